//! Fatbins: the kernels of the machine code for this card, with what a launch of each must fit.
//!
//! A fatbin is a header and entries; entries of kind 2 are ELF files for one architecture. Of a kernel NAME, `.nv.info.NAME` lists
//! attributes and `.nv.shared.NAME` is as large as the shared memory that it declares. Machine code that is compressed, as other versions of
//! nvcc make it, is not read.

use crate::Code;

const INVALID_IMAGE: Code = 200;
const NO_BINARY_FOR_GPU: Code = 209;

const MAGIC: u32 = 0xba55_ed50;
const MACHINE_CODE: u16 = 2;
/// Attributes: one parameter's place and size; most threads of a block.
const PARAMETER: u8 = 0x17;
const MAX_THREADS: u8 = 0x05;

/// A kernel, and what a launch of it must fit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kernel {
    pub name: String,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    /// Bytes of shared memory that it declares.
    pub shared: usize,
    /// Most threads of a block, by dimension; none when it does not say.
    pub threads: Option<[u32; 3]>,
}

/// Numbers at places of some bytes; places beyond the end are an error.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn array<const N: usize>(self, at: usize) -> Result<[u8; N], Code> {
        self.0.get(at..).and_then(|b| b.first_chunk()).copied().ok_or(INVALID_IMAGE)
    }

    fn u16(self, at: usize) -> Result<u16, Code> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(self, at: usize) -> Result<u32, Code> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn size(self, at: usize) -> Result<usize, Code> {
        usize::try_from(u64::from_le_bytes(self.array(at)?)).map_err(|_| INVALID_IMAGE)
    }

    fn part(self, at: usize, len: usize) -> Result<Self, Code> {
        at.checked_add(len).and_then(|end| self.0.get(at..end)).map(Self).ok_or(INVALID_IMAGE)
    }

    fn name(self, at: usize) -> Result<&'a str, Code> {
        let from = self.0.get(at..).ok_or(INVALID_IMAGE)?;
        let len = from.iter().position(|b| *b == 0).ok_or(INVALID_IMAGE)?;
        std::str::from_utf8(&from[..len]).map_err(|_| INVALID_IMAGE)
    }
}

fn word(n: u32) -> Result<usize, Code> {
    usize::try_from(n).map_err(|_| INVALID_IMAGE)
}

/// Bytes of the whole image, as its header says.
pub fn len(header: &[u8; 16]) -> Result<usize, Code> {
    let header = Bytes(header);
    if header.u32(0)? != MAGIC {
        return Err(INVALID_IMAGE);
    }
    header.size(8)?.checked_add(usize::from(header.u16(6)?)).ok_or(INVALID_IMAGE)
}

/// The kernels for cards of an architecture.
pub fn kernels(image: &[u8], architecture: u32) -> Result<Vec<Kernel>, Code> {
    let image = Bytes(image);
    let mut at = usize::from(image.u16(6)?);
    while at < image.0.len() {
        let (header, size) = (word(image.u32(at + 4)?)?, image.size(at + 8)?);
        if image.u16(at)? == MACHINE_CODE && image.u32(at + 28)? == architecture {
            return of_elf(image.part(at + header, size)?);
        }
        at = at.checked_add(header).and_then(|a| a.checked_add(size)).ok_or(INVALID_IMAGE)?;
    }
    Err(NO_BINARY_FOR_GPU)
}

fn of_elf(elf: Bytes<'_>) -> Result<Vec<Kernel>, Code> {
    if elf.array::<4>(0)? != *b"\x7fELF" {
        return Err(INVALID_IMAGE);
    }
    let (table, each) = (elf.size(0x28)?, usize::from(elf.u16(0x3a)?));
    let (count, names) = (usize::from(elf.u16(0x3c)?), usize::from(elf.u16(0x3e)?));
    let names = elf.size(table + names * each + 24)?;
    let section = |i: usize| -> Result<(&str, usize, usize), Code> {
        let at = table + i * each;
        Ok((elf.name(names + word(elf.u32(at)?)?)?, elf.size(at + 24)?, elf.size(at + 32)?))
    };
    let sections = (0..count).map(section).collect::<Result<Vec<_>, _>>()?;
    let mut all = Vec::new();
    for (section, at, len) in &sections {
        let Some(name) = section.strip_prefix(".nv.info.") else { continue };
        let shared = sections.iter().find(|(s, ..)| s.strip_prefix(".nv.shared.") == Some(name)).map_or(0, |s| s.2);
        let mut kernel = Kernel { name: name.to_owned(), shared, ..Kernel::default() };
        attributes(elf.part(*at, *len)?, &mut kernel)?;
        all.push(kernel);
    }
    Ok(all)
}

/// A list of format, attribute and a short number, which with format 4 is the length of what follows.
fn attributes(list: Bytes<'_>, kernel: &mut Kernel) -> Result<(), Code> {
    let mut at = 0;
    while at < list.0.len() {
        let ([format, attribute], len) = (list.array::<2>(at)?, usize::from(list.u16(at + 2)?));
        at += 4;
        if format != 4 {
            continue;
        }
        let value = list.part(at, len)?;
        match attribute {
            // The parameter's number and offset are 16 bits each, and its size the upper 14 bits of the last word.
            PARAMETER => {
                let number = usize::from(value.u16(4)?);
                if kernel.params.len() <= number {
                    kernel.params.resize(number + 1, (0, 0));
                }
                kernel.params[number] = (usize::from(value.u16(6)?), word(value.u32(8)? >> 18)?);
            }
            MAX_THREADS => kernel.threads = Some([value.u32(0)?, value.u32(4)?, value.u32(8)?]),
            _ => {}
        }
        at += len;
    }
    Ok(())
}
