//! A device that faults ends the process at once, with the cause: a real fault, in a process of its own.

use std::process::Command;

use ds4_kernels::{BatchPlan, Device, StateKind, StateSpec, StateType};
use serde_json::{Value, json};

use crate::{download, upload};

/// The argument with which this binary does [`fault`].
pub(crate) const ARGUMENT: &str = "fault";
const WIDTH: usize = 64;

/// Writes a row to where a bank's memory was.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only a CUDA device can fault"))]
pub(crate) fn fault<D: Device>(d: &D) {
    let spec = StateSpec { slots: vec![StateKind::Append { width: WIDTH, ty: StateType::F32 }] };
    let mut banks = [d.bank(&spec, 4).unwrap()];
    d.bank_commit(&mut banks[0], 4).unwrap();
    let mut plan = BatchPlan::default();
    plan.push(0, 0, &[0], false);
    let step = d.step(&plan, &mut banks).unwrap();
    let x = upload(d, WIDTH, &[1.0; WIDTH]);
    d.state_write(&step, 0, &x);
    assert_eq!(download(d, &x, 1).len(), WIDTH, "it works as long as the memory is there");
    println!("before");
    d.bank_trim(&mut banks[0], 0);
    d.state_write(&step, 0, &x);
    download(d, &x, 1);
    println!("after");
}

/// A child faults: it ends with the code of a lost device, says what happened, and did nothing after it; this process goes on.
pub(crate) fn check<D: Device>(d: &D) -> Value {
    let child = Command::new(std::env::current_exe().unwrap()).arg(ARGUMENT).output().unwrap();
    let [out, err] = [&child.stdout, &child.stderr].map(|b| String::from_utf8_lossy(b));
    let said = err.lines().last().unwrap_or_default();
    assert_eq!(child.status.code(), Some(71), "{out}{err}");
    assert!(out.contains("before") && !out.contains("after"), "{out}");
    assert!(said.starts_with("fatal: ") && said.ends_with("[cuda_device_lost]"), "{err}");
    assert_eq!(download(d, &upload(d, WIDTH, &[2.0; WIDTH]), 1), [2.0; WIDTH]);
    json!({"exit_code": 71, "said": said})
}
