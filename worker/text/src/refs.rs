//! `$ref`s in the only form that the grammar's library follows: pointers from the root, whose segments are names as they are.
//!
//! It takes `~0`, `~1` and `%20` for letters of a name, and knows neither anchors nor the schema's own `$id`. What can only be
//! reached in such ways is copied to a definition of its own, as is what lies outside of the definitions: a tool's parameters become
//! grammars one by one, each with the definitions and without the rest.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use crate::constraint::{ConstraintError, fits, length};
use crate::schema::{DEFINITIONS, few_parts, inside, inside_mut, refused};

/// Most bytes of a schema's own `$id` that references are resolved against; with a longer one they must spell all of it, or nothing.
const MOST_ID: usize = 2048;

/// Rewrites the references that lead somewhere inside of the schema, and leaves anchors out. The library minds those that do not, if a value comes to them.
///
/// # Errors
/// One in a part with an `$id` of its own, which it would have to be resolved against; too many copies, or of too many bytes.
pub(crate) fn resolve(root: &mut Value) -> Result<(), ConstraintError> {
    let mut found = Found::default();
    found.collect(root, true, true)?;
    let id = root.get("$id").and_then(Value::as_str).map(|id| id.trim_end_matches('#'));
    let mut rewritten = HashMap::new();
    let mut copies = Map::new();
    let (mut names, mut bytes) = (Names { root, tried: 0 }, 0);
    for text in &found.refs {
        let (document, fragment) = text.split_once('#').unwrap_or((text, ""));
        let own = document.is_empty() || id.is_some_and(|id| leads_to(document, id));
        let inner = Some(fragment).filter(|_| own);
        let target = inner.and_then(|inner| found.target(root, inner));
        if target.is_none() && inner == Some("/") {
            // The library takes it for the root.
            return refused("`$ref` `#/` is the part whose name is empty, and there is none");
        }
        let Some((target, plain)) = target.filter(|_| !rewritten.contains_key(*text)) else { continue };
        let to = match plain {
            Some(plain) => plain,
            None => {
                // A part may hold the next one, and that another.
                bytes += length(target);
                fits(bytes)?;
                few_parts(copies.len() + 1)?;
                let name = names.free();
                let to = format!("#/$defs/{name}");
                let mut copy = target.clone();
                if let Some(copy) = copy.as_object_mut() {
                    // What they mean is said by the rewritten references.
                    copy.retain(|key, _| key != "$id" && !DEFINITIONS.contains(&key.as_str()));
                }
                copies.insert(name, copy);
                to
            }
        };
        rewritten.insert((*text).to_owned(), to);
    }
    rewrite(root, &rewritten);
    if let Some(root) = root.as_object_mut().filter(|_| !copies.is_empty()) {
        copies.values_mut().for_each(|copy| rewrite(copy, &rewritten));
        if let Value::Object(definitions) = root.entry("$defs").or_insert_with(|| Map::new().into()) {
            definitions.extend(copies);
        }
    }
    Ok(())
}

/// Puts what the root refers to in the root's place, as some generators have all of a schema in a definition. The definitions stay, and
/// so does what `may_stay` of the root's own. A root that says more is left as it is.
pub(crate) fn inline_root(root: &mut Value, may_stay: impl Fn(&str, &Value) -> bool) {
    let mut seen = HashSet::new();
    while let Some(object) = root.as_object()
        && let Some(at) = object.get("$ref").and_then(Value::as_str)
        && object
            .iter()
            .all(|(key, value)| key == "$ref" || DEFINITIONS.contains(&key.as_str()) || may_stay(key, value))
        && let Some(Value::Object(target)) = at.strip_prefix('#').and_then(|at| root.pointer(at))
        && seen.insert(at.to_owned())
    {
        let mut target = target.clone();
        target.retain(|key, _| key != "$id" && !DEFINITIONS.contains(&key.as_str()));
        let Value::Object(before) = std::mem::take(root) else { return };
        for (key, value) in before {
            if key != "$ref" {
                target.entry(key).or_insert(value);
            }
        }
        *root = target.into();
    }
}

/// Names for copies. Each is tried once, as the client may have taken it: a search from the first one for every copy is quadratic.
struct Names<'a> {
    root: &'a Value,
    tried: usize,
}

impl Names<'_> {
    fn free(&mut self) -> String {
        loop {
            let name = format!("ds4-{}", self.tried);
            self.tried += 1;
            if self.root.get("$defs").is_none_or(|defs| defs.get(&name).is_none()) {
                return name;
            }
        }
    }
}

/// What a schema has of references and of names for them.
#[derive(Default)]
struct Found<'a> {
    refs: Vec<&'a str>,
    anchors: HashMap<&'a str, &'a Value>,
    /// Those of the root's own document, where no two parts may have the same one.
    own_anchors: HashSet<&'a str>,
}

impl<'a> Found<'a> {
    fn collect(&mut self, schema: &'a Value, is_root: bool, own: bool) -> Result<(), ConstraintError> {
        let text = |key: &str| schema.get(key).and_then(Value::as_str);
        // Before draft 2019-09 an anchor was an `$id`.
        let (anchor, id) = match text("$id") {
            Some(id) if id.starts_with('#') => (id.get(1..), None),
            id => (None, id.filter(|_| !is_root)),
        };
        let own = own && id.is_none();
        if let Some(anchor) = text("$anchor").or(anchor) {
            if own {
                if !self.own_anchors.insert(anchor) {
                    let anchor: String = anchor.chars().take(64).collect();
                    return refused(format!("two parts of the schema have the `$anchor` {anchor}; rename one of them"));
                }
                self.anchors.insert(anchor, schema);
            } else {
                self.anchors.entry(anchor).or_insert(schema);
            }
        }
        self.refs.extend(text("$ref"));
        let before = self.refs.len();
        inside(schema).try_for_each(|(_, part)| self.collect(part, false, own))?;
        if let Some(id) = id
            && (text("$ref").is_some() || self.refs.len() > before)
        {
            let id: String = id.chars().take(64).collect();
            return refused(format!(
                "a `$ref` in a part of the schema with an `$id` of its own ({id}) is not followed on this server"
            ));
        }
        Ok(())
    }

    /// What a fragment names, and how the library can be told; `None`: it cannot.
    fn target(&self, root: &'a Value, fragment: &str) -> Option<(&'a Value, Option<String>)> {
        if let Some(anchored) = self.anchors.get(fragment) {
            return Some((anchored, None));
        }
        // Some write names as they are, where the standard wants escapes.
        let at = |pointer: &str| root.pointer(pointer).map(|target| (target, pointer.to_owned()));
        let (target, pointer) = at(&unescaped(fragment)).or_else(|| at(fragment))?;
        let mut names = pointer.split('/').skip(1);
        let plain = names.next().is_some_and(|first| DEFINITIONS.contains(&first))
            && names.clone().count() == 1
            && names.all(|name| !name.is_empty() && !name.contains('~'));
        Some((target, plain.then(|| format!("#{pointer}"))))
    }
}

/// Whether a reference in a document with this `$id` leads to the document itself, by RFC 3986 as far as paths go.
fn leads_to(reference: &str, id: &str) -> bool {
    if reference == id {
        return true;
    }
    // Each of thousands of references would be taken apart with the whole of the `$id`.
    if id.len() > MOST_ID {
        return false;
    }
    // "scheme://host" and the path.
    let split = |uri: &str| -> (usize, usize) {
        let scheme = uri.find("://").filter(|at| !uri[..*at].contains('/'));
        let host = scheme.map_or(0, |at| at + "://".len());
        (scheme.map_or(0, |at| at + 1), scheme.map_or(0, |_| uri[host..].find('/').map_or(uri.len(), |at| host + at)))
    };
    let (scheme, host) = split(id);
    let directory = id.rfind('/').filter(|at| *at >= host).map_or(host, |at| at + 1);
    let base = match reference {
        r if split(r) != (0, 0) => "",
        r if r.starts_with("//") => &id[..scheme],
        r if r.starts_with('/') => &id[..host],
        _ => &id[..directory],
    };
    let without_dots = |uri: &str| {
        let path = split(uri).1;
        let mut names: Vec<&str> = Vec::new();
        for name in uri[path..].split('/') {
            match name {
                "." => {}
                ".." if names.last().is_some_and(|last| !last.is_empty()) => drop(names.pop()),
                ".." => {}
                name => names.push(name),
            }
        }
        uri[..path].to_owned() + &names.join("/")
    };
    without_dots(&format!("{base}{reference}")) == without_dots(id)
}

/// A text without `%xx`; as it is, if that is no text.
fn unescaped(text: &str) -> Cow<'_, str> {
    if !text.contains('%') {
        return text.into();
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..2).filter(|d| first == b'%' && d.iter().all(u8::is_ascii_hexdigit));
        let escaped = digits.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 16).ok());
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8(bytes).map_or(text.into(), Into::into)
}

fn rewrite(schema: &mut Value, rewritten: &HashMap<String, String>) {
    let Value::Object(object) = schema else { return };
    if let Some(Value::String(at)) = object.get_mut("$ref")
        && let Some(to) = rewritten.get(at)
    {
        at.clone_from(to);
    }
    // Nothing goes by them any more, and a copy must not have the same one.
    object.retain(|key, value| {
        key != "$anchor" && !(key == "$id" && value.as_str().is_some_and(|id| id.starts_with('#')))
    });
    inside_mut(object).for_each(|part| rewrite(part, rewritten));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::starter_tokenizer;
    use crate::{Constraint, Specials};

    fn held(schema: &Value) -> Result<Constraint, ConstraintError> {
        starter_tokenizer().grammars().and_then(|g| g.schema(schema))
    }

    /// Whether this is a whole answer.
    fn accepts(schema: &Value, text: &str) -> bool {
        let tokenizer = starter_tokenizer();
        let mut held = held(schema).unwrap_or_else(|e| panic!("{e}: {schema}"));
        let tokens = tokenizer.encode(text, Specials::Plain).into_iter().chain(tokenizer.eos());
        tokens.into_iter().all(|token| {
            let permitted = held.permits(token).expect("a verdict");
            held.take(token);
            permitted
        })
    }

    #[test]
    fn every_way_to_write_a_reference_leads_to_its_part() {
        let whole = json!({"type": "integer"});
        for (at, name) in [
            ("#/$defs/a", "a"),
            ("#/$defs/a~1b", "a/b"),
            ("#/$defs/a~0b", "a~b"),
            ("#/$defs/a~01", "a~1"),
            ("#/$defs/a~b", "a~b"),
            ("#/$defs/a%20b", "a b"),
            ("#/$defs/a b", "a b"),
            ("#/$defs/a%b", "a%b"),
            ("#/$defs/100%25", "100%"),
            ("#/$defs/a%20b", "a%20b"),
            ("#/$defs/List%3Cint%3E", "List<int>"),
            ("#/$defs/List[int]", "List[int]"),
            ("#/$defs/Gr%C3%B6%C3%9Fe", "Größe"),
            ("#/$defs/Größe", "Größe"),
            ("#/$defs/%ff", "%ff"),
            ("#/$defs/", ""),
            ("https://example.com/s#/$defs/a~1b", "a/b"),
        ] {
            let schema =
                json!({"$id": "https://example.com/s", "$defs": {name: whole}, "type": "array", "items": {"$ref": at}});
            assert!(accepts(&schema, "[1]") && !accepts(&schema, "[true]"), "{at}");
        }
        for at in ["#whole", "#/$defs/a/anyOf/0", "#/$defs/a/anyOf/1/properties/x"] {
            let schema = json!({"items": {"$ref": at}, "type": "array", "$defs": {
                "a": {"anyOf": [whole, {"properties": {"x": whole}}]}, "b": {"$anchor": "whole", "type": "integer"}}});
            assert!(accepts(&schema, "[1]") && !accepts(&schema, "[true]"), "{at}");
        }
        let older = json!({"items": {"$ref": "#whole"}, "type": "array", "definitions": {"b": {"$id": "#whole", "type": "integer"}}});
        assert!(accepts(&older, "[1]") && !accepts(&older, "[true]"));
    }

    #[test]
    fn a_reference_through_the_schema_s_own_id_leads_into_it() {
        for (id, at, leads) in [
            ("root.json", "root.json", true),
            ("root.json", "./root.json", true),
            ("root.json", "/root.json", false),
            ("/s/root.json", "root.json", true),
            ("/s/root.json", "/s/root.json", true),
            ("/s/root.json", "../s/root.json", true),
            ("https://example.com/s/root.json", "root.json", true),
            ("https://example.com/s/root.json", "/s/root.json", true),
            ("https://example.com/s/root.json", "//example.com/s/root.json", true),
            ("https://example.com/s/root.json", "../s/./root.json", true),
            ("https://example.com/s/root.json", "../../../s/root.json", true),
            ("https://example.com/s/root.json", "https://example.com/s/root.json", true),
            ("https://example.com/s/root.json", "/root.json", false),
            ("https://example.com/s/root.json", "oot.json", false),
            ("https://example.com/s/root.json", "http://example.com/s/root.json", false),
            ("https://example.com/s/root.json", "s/root.json", false),
            ("https://example.com", "/x", false),
            ("urn:example:s", "urn:example:s", true),
            ("urn:example:s", "s", false),
            ("../root.json", "root.json", true),
        ] {
            assert_eq!(leads_to(at, id), leads, "{at} from {id}");
            let schema = json!({"$id": id, "type": "array", "items": {"$ref": format!("{at}#/$defs/x")}, "$defs": {"x": {"type": "integer"}}});
            if leads {
                assert!(accepts(&schema, "[1]") && !accepts(&schema, "[true]"), "{at} from {id}");
            } else {
                assert!(held(&schema).is_err(), "{at} from {id}");
            }
        }
    }

    #[test]
    fn two_parts_with_one_anchor_are_refused() {
        let twice = json!({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "string"}, "y": {"$anchor": "a", "type": "integer"}}});
        assert!(held(&twice).unwrap_err().0.contains("`$anchor` a;"));
        // Documents inside of this one have their own.
        let inner = json!({"$ref": "#a", "$defs": {"w": {"$id": "w", "$anchor": "a"}, "x": {"$anchor": "a", "type": "integer"},
            "z": {"$id": "z", "properties": {"y": {"$anchor": "a", "type": "string"}}}}});
        assert!(accepts(&inner, "1") && !accepts(&inner, "\"a\""));
        // A part and its copy are none.
        let mut copied = json!({"items": {"$ref": "#a"}, "$defs": {"x": {"$anchor": "a", "items": {"$anchor": "b"}}}});
        assert_eq!((resolve(&mut copied), resolve(&mut copied)), (Ok(()), Ok(())));
    }

    #[test]
    fn what_refers_to_itself_stays_whole() {
        for at in ["#", "#node", "https://example.com/s", "#/$defs/ds4-0"] {
            let schema = json!({"$id": "https://example.com/s#", "$anchor": "node", "type": "object", "additionalProperties": false,
                "properties": {"next": {"$ref": at}, "n": {"type": "integer"}},
                "$defs": {"ds4-0": {"$ref": "#"}}});
            assert!(accepts(&schema, r#"{"next": {"next": {"n": 1}}, "n": 2}"#), "{at}");
            assert!(!accepts(&schema, r#"{"next": {"next": {"n": "1"}}}"#), "{at}");
            assert!(!accepts(&schema, r#"{"next": [1]}"#), "{at}");
        }
    }

    #[test]
    fn a_reference_that_cannot_be_followed_is_named() {
        let refusal = |schema: Value| held(&schema).unwrap_err().0;
        let of = |at: &str| json!({"type": "array", "items": {"$ref": at}, "$defs": {"a": {}}});
        for at in ["#/$defs/b", "#/", "#nowhere", "https://example.com/x.json"] {
            assert!(refusal(of(at)).contains(at), "{}", refusal(of(at)));
        }
        let embedded =
            json!({"items": {"$id": "inner", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {}}}, "$defs": {"a": {}}});
        assert!(refusal(embedded).contains("(inner)"));
        assert!(refusal(json!({"items": {"$dynamicRef": "#a"}})).contains("$dynamicRef"));
        // What nothing comes to is no fault, nor is a name or a value that looks like one.
        let unused = json!({"type": "integer", "$defs": {"a": {"$ref": "nowhere"}}, "default": {"$ref": "nowhere"}});
        assert!(accepts(&unused, "1"));
        let names =
            json!({"type": "object", "properties": {"$ref": {"const": {"$ref": "nowhere"}}}, "required": ["$ref"]});
        assert!(accepts(&names, r#"{"$ref": {"$ref": "nowhere"}}"#));
    }

    #[test]
    fn copies_are_named_in_one_pass_and_no_more_of_them_are_made_than_a_schema_may_have_parts() {
        let taken: Map<String, Value> = (0..3000).map(|i| (format!("ds4-{}", 2 * i), json!({}))).collect();
        let root = json!({"$defs": taken});
        let mut names = Names { root: &root, tried: 0 };
        let free: Vec<String> = (0..3000).map(|_| names.free()).collect();
        assert!(free.iter().enumerate().all(|(i, name)| *name == format!("ds4-{}", 2 * i + 1)));
        assert_eq!(names.tried, 6000, "each once");

        // Each refers to a part that is no definition, and takes a copy of two bytes.
        let of = |n: usize| {
            let refs = (0..n).map(|i| json!({"$ref": format!("#/x/{i}")}));
            json!({"anyOf": refs.collect::<Vec<_>>(), "x": vec![json!({}); n]})
        };
        let mut most = of(2000);
        assert_eq!(resolve(&mut most), Ok(()));
        for n in [2001, 40_000] {
            let (mut schema, before) = (of(n), of(n));
            assert!(resolve(&mut schema).unwrap_err().0.contains("more than 2000"));
            assert_eq!(schema, before, "it ends before any is put in");
        }
        assert!(held(&of(40_000)).unwrap_err().0.contains("more than 2000"));
    }

    #[test]
    fn an_id_is_taken_apart_for_its_references_only_where_it_is_short() {
        let id = |bytes: usize| format!("https://example.com/{}s", "a/".repeat((bytes - 21) / 2));
        for (bytes, resolved) in [(21, true), (MOST_ID - 1, true), (MOST_ID + 1, false), (500_001, false)] {
            let id = id(bytes);
            assert!(leads_to("s", &id) == resolved && leads_to(&id, &id), "{}", id.len());
        }
        // 10,000 references: half a minute, if each were resolved against all of it.
        let refs: Vec<Value> = (0..10_000).map(|i| json!({"$ref": format!("s#/x/{i}")})).collect();
        let mut long = json!({"$id": id(500_001), "anyOf": refs});
        assert_eq!(resolve(&mut long), Ok(()));
    }

    #[test]
    fn copies_of_copies_are_bounded() {
        let mut nested = json!({"description": "d".repeat(40_000)});
        for i in (0..40).rev() {
            nested = json!({"$anchor": format!("a{i}"), "items": nested});
        }
        let refs: Vec<Value> = (0..40).map(|i| json!({"$ref": format!("#a{i}")})).collect();
        let schema = json!({"anyOf": refs, "$defs": {"a": nested}});
        assert!(held(&schema).unwrap_err().0.contains("too large"));
    }
}
