//! Compiles the .proto files without protoc.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    use prost::Message;
    let files = ["proto/ds4/v1/owner.proto", "proto/ds4/v1/worker.proto", "proto/ds4/v1/debug.proto"];
    println!("cargo:rerun-if-changed=proto");
    let set = protox::compile(files, ["proto"])?;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("ds4_descriptor.bin"), set.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(set)?;
    Ok(())
}
