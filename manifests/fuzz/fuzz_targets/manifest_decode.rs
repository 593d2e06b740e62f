//! Any bytes as a manifest, and as a manifest's body under a fitting hash; what decodes must be consistent and encode again.
#![no_main]

use ds4_manifests::codec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = codec::decode(bytes);
    let Ok(manifest) = codec::decode(&codec::frame(bytes)) else { return };
    codec::validate(&manifest).expect("a decoded manifest is consistent");
    let again = codec::encode(&manifest).expect("and can be encoded");
    // Compared as bytes: a NaN is not equal to itself.
    let twice = codec::encode(&codec::decode(&again).expect("and decoded")).expect("and encoded again");
    assert_eq!(again, twice);
});
