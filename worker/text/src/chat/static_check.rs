//! Finds, before any rendering, the filters, tests, functions and methods of a template that do not exist here. Rendering
//! would find them only in the branches that a conversation happens to take.

use ahash::AHashSet;
use minijinja::machinery::{Instruction, Instructions, get_compiled_template};
use minijinja::{Environment, ErrorKind, Template};

use super::python;

/// Methods of `minijinja_contrib::pycompat` and of the engine's own objects (`loop`, `namespace`).
const METHODS: &[&str] = &[
    "get",
    "items",
    "keys",
    "values",
    "count",
    "capitalize",
    "endswith",
    "find",
    "format",
    "isalnum",
    "isalpha",
    "isascii",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "isupper",
    "join",
    "lower",
    "replace",
    "rfind",
    "split",
    "splitlines",
    "startswith",
    "title",
    "upper",
    "cycle",
    "changed",
];

/// The first thing in `template` that does not exist: its line and what it is.
pub(super) fn first_unknown(env: &Environment<'_>, template: &Template<'_, '_>) -> Option<(usize, String)> {
    let compiled = get_compiled_template(template);
    let bodies: Vec<&Instructions<'_>> =
        std::iter::once(&compiled.instructions).chain(compiled.blocks.values()).collect();
    let mut own: AHashSet<&str> = AHashSet::new();
    for body in &bodies {
        for (_, instruction) in all(body) {
            if let Instruction::StoreLocal(name) | Instruction::BuildMacro(name, _, _) = instruction {
                own.insert(name);
            }
        }
    }
    let globals: AHashSet<String> = env.globals().map(|(name, _)| name.to_owned()).collect();
    for body in bodies {
        for (at, instruction) in all(body) {
            let line = body.get_line(at).unwrap_or(0);
            let unknown = match instruction {
                Instruction::ApplyFilter(name, ..) if !exists(env, &format!("''|{name}"), ErrorKind::UnknownFilter) => {
                    format!("there is no filter {name:?}")
                }
                Instruction::PerformTest(name, ..)
                    if !exists(env, &format!("'' is {name}"), ErrorKind::UnknownTest) =>
                {
                    format!("there is no test {name:?}")
                }
                Instruction::CallFunction(name, _)
                    if !own.contains(name)
                        && !globals.contains(*name)
                        && !matches!(*name, "caller" | "loop" | "super") =>
                {
                    format!("there is no function {name:?}")
                }
                // A method may also be a macro or function kept in an attribute; those names are stored somewhere.
                Instruction::CallMethod(name, _)
                    if !METHODS.contains(name) && !python::METHODS.contains(name) && !own.contains(name) =>
                {
                    format!("there is no method .{name}()")
                }
                Instruction::Include(_) | Instruction::LoadBlocks => "it needs another template".to_owned(),
                _ => continue,
            };
            return Some((line, unknown));
        }
    }
    None
}

fn all<'i, 's>(body: &'i Instructions<'s>) -> impl Iterator<Item = (u32, &'i Instruction<'s>)> {
    (0u32..).map_while(|at| body.get(at).map(|i| (at, i)))
}

/// True unless evaluating `expression` fails with `missing`; any other outcome means that the name was found.
fn exists(env: &Environment<'_>, expression: &str, missing: ErrorKind) -> bool {
    match env.compile_expression(expression).and_then(|e| e.eval(())) {
        Ok(_) => true,
        Err(e) => e.kind() != missing,
    }
}
