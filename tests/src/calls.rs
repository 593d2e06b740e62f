//! What a process called of the fake driver, as its log has it (`FAKE_CUDA_LOG`).

use std::fs::File;
use std::io::Read as _;

/// Calls in order, and what the fake says of each: bytes of a copy, a kernel's name, operations of a graph, operations that a wait
/// had to wait for.
#[derive(Clone, Debug, Default)]
pub struct Calls(Vec<(String, String)>);

/// A process's own log.
#[derive(Debug)]
pub struct CallLog(File);

impl CallLog {
    /// Of this process, which has a card that is logged.
    ///
    /// # Panics
    /// When it has not, or has not called anything yet.
    pub fn open() -> Self {
        Self(File::open(std::env::var_os("FAKE_CUDA_LOG").expect("a card that is logged")).expect("the log"))
    }

    /// Calls since it was asked last.
    ///
    /// # Panics
    /// When the log is not one.
    pub fn new_calls(&mut self) -> Calls {
        let mut new = String::new();
        self.0.read_to_string(&mut new).expect("the log");
        let lines = new.lines().map(|l| l.split_once(' ').expect("a call and what is said of it"));
        Calls(lines.map(|(name, said)| (name.to_owned(), said.to_owned())).collect())
    }
}

impl Calls {
    /// What is said of the calls of one function.
    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(n, _)| n == name).map(|(_, said)| said.as_str())
    }

    /// How often it was called.
    pub fn count(&self, name: &str) -> usize {
        self.of(name).count()
    }

    /// The numbers that are said of its calls.
    ///
    /// # Panics
    /// When something else is.
    pub fn numbers(&self, name: &str) -> Vec<usize> {
        self.of(name).map(|said| said.parse().unwrap_or_else(|_| panic!("{name} {said}"))).collect()
    }

    /// Their sum.
    pub fn sum(&self, name: &str) -> usize {
        self.numbers(name).iter().sum()
    }

    /// Kernels and copies that were given to the device, in graphs or not. Those that were recorded were called too.
    pub fn operations(&self) -> usize {
        let called = self.count("cuLaunchKernelEx") + self.count("cuMemcpyDtoDAsync_v2");
        self.sum("cuGraphLaunch") + called - self.sum("cuGraphInstantiateWithFlags")
    }

    /// Parts that each begin with a call of a function.
    pub fn split(&self, name: &str) -> Vec<Self> {
        let mut parts: Vec<Self> = Vec::new();
        for call in &self.0 {
            if call.0 == name {
                parts.push(Self::default());
            }
            if let Some(part) = parts.last_mut() {
                part.0.push(call.clone());
            }
        }
        parts
    }

    /// Asserts that nothing but these functions was called.
    ///
    /// # Panics
    /// When something was.
    pub fn only(&self, allowed: &[&str]) {
        let other = self.0.iter().find(|(name, _)| name != "cuCtxSetCurrent" && !allowed.contains(&name.as_str()));
        assert_eq!(other, None, "in {self:?}");
    }
}
