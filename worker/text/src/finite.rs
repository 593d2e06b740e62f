//! Which parts of a schema have a value that ends.
//!
//! An object with a required member that follows the same schema has none: a model held to it writes until its budget is used up. Such
//! kinds of values are left out of the parts that ask for them, and a schema of nothing else is refused.
//!
//! A value of one kind follows a part if it follows all that the part says of this kind: a formula of "and" and "or" over other parts.
//! Its least solution has the values that end, its greatest one endless ones, too. What neither has, such as a number that is a
//! string, is left to the grammar's library.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use crate::constraint::ConstraintError;
use crate::schema::{inside, inside_mut, refused};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// Whatever holds no other value.
    Scalar,
    Array,
    Object,
}

const KINDS: [Kind; 3] = [Kind::Scalar, Kind::Array, Kind::Object];
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// Keywords of what is inside of a value.
const MEMBERS: [&str; 6] =
    ["properties", "patternProperties", "additionalProperties", "prefixItems", "items", "additionalItems"];

impl Kind {
    fn of_type(name: &Value) -> Self {
        match name.as_str() {
            Some("array") => Self::Array,
            Some("object") => Self::Object,
            _ => Self::Scalar,
        }
    }

    fn of(value: &Value) -> Self {
        match value {
            Value::Array(_) => Self::Array,
            Value::Object(_) => Self::Object,
            _ => Self::Scalar,
        }
    }
}

/// Leaves out what has no end. References are pointers to definitions, as [`crate::refs::resolve`] leaves them.
///
/// # Errors
/// Nothing else is there.
pub(crate) fn only(schema: &mut Value) -> Result<(), ConstraintError> {
    let mut formula =
        Formula { root: schema, nodes: Vec::new(), known: HashMap::new(), own: Vec::new(), open: Vec::new() };
    let whole = formula.any(schema);
    while let Some((part, kind, node)) = formula.open.pop() {
        formula.say(part, kind, node);
    }
    let (ends, fails) = (formula.spread(true), formula.spread(false));
    let endless = |node: usize| !ends[node] && !fails[node];
    let own = formula.own.iter().filter(|(_, _, node)| endless(*node));
    let own: HashSet<(*const Value, Kind)> = own.map(|(part, kind, _)| (*part, *kind)).collect();
    // Parts that refer to each other and to nothing else are left to the library.
    if own.is_empty() {
        return Ok(());
    }
    if endless(whole) {
        return refused(
            "nothing can follow it: each value would have to hold another one that follows the same part, without end",
        );
    }
    // The library minds a reference to a part of which nothing is left.
    let of_parts = || formula.known.iter().filter(|((_, kind), _)| kind.is_some());
    let mut none: HashSet<*const Value> =
        of_parts().filter(|(_, n)| endless(**n)).map(|((part, _), _)| *part).collect();
    of_parts().filter(|(_, n)| ends[**n]).for_each(|((part, _), _)| {
        none.remove(part);
    });
    leave_out(schema, &none, &own);
    Ok(())
}

fn leave_out(schema: &mut Value, none: &HashSet<*const Value>, kinds: &HashSet<(*const Value, Kind)>) {
    let at = std::ptr::from_ref(schema);
    if none.contains(&at) {
        *schema = json!(false);
    }
    let Value::Object(object) = schema else { return };
    // Before anything moves.
    inside_mut(object).for_each(|part| leave_out(part, none, kinds));
    if KINDS.iter().any(|kind| kinds.contains(&(at, *kind))) {
        let mut types = types(object).unwrap_or_else(|| TYPES.map(Value::from).to_vec());
        types.retain(|t| !kinds.contains(&(at, Kind::of_type(t))));
        object.insert("type".into(), types.into());
    }
}

/// What a part says of types.
fn types(part: &Map<String, Value>) -> Option<Vec<Value>> {
    match part.get("type")? {
        Value::Array(list) => Some(list.clone()),
        one => Some(vec![one.clone()]),
    }
}

/// True if all of its parts are, or if one is.
struct Node {
    all: bool,
    parts: usize,
    /// Nodes that this one is a part of, each as often as it is.
    part_of: Vec<usize>,
}

struct Formula<'a> {
    root: &'a Value,
    nodes: Vec<Node>,
    /// The node of a part of the schema and a kind of values, or any kind.
    known: HashMap<(*const Value, Option<Kind>), usize>,
    /// Those of what a part itself says of the members of a kind.
    own: Vec<(*const Value, Kind, usize)>,
    /// Those of which nothing is said yet.
    open: Vec<(&'a Value, Kind, usize)>,
}

impl<'a> Formula<'a> {
    fn node(&mut self, all: bool, parts: &[usize]) -> usize {
        self.nodes.push(Node { all, parts: 0, part_of: Vec::new() });
        self.join(self.nodes.len() - 1, parts);
        self.nodes.len() - 1
    }

    fn join(&mut self, node: usize, parts: &[usize]) {
        self.nodes[node].parts = parts.len();
        parts.iter().for_each(|part| self.nodes[*part].part_of.push(node));
    }

    /// A value of any kind follows this part.
    fn any(&mut self, part: &'a Value) -> usize {
        let key = (std::ptr::from_ref(part), None);
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let kinds = KINDS.map(|kind| self.of_kind(part, kind));
        let node = self.node(false, &kinds);
        self.known.insert(key, node);
        node
    }

    /// A value of this kind follows this part.
    fn of_kind(&mut self, part: &'a Value, kind: Kind) -> usize {
        let key = (std::ptr::from_ref(part), Some(kind));
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let node = self.node(true, &[]);
        self.known.insert(key, node);
        self.open.push((part, kind, node));
        node
    }

    /// Says what must be true for a value of this kind to follow this part.
    fn say(&mut self, part: &'a Value, kind: Kind, node: usize) {
        let Value::Object(object) = part else {
            // Nothing follows `false`: as one of no parts.
            self.nodes[node].all = part != false;
            return;
        };
        let values = object.get("const").map(std::slice::from_ref);
        let values = values.or_else(|| object.get("enum").and_then(Value::as_array).map(Vec::as_slice));
        let typed = types(object).is_none_or(|types| types.iter().any(|t| Kind::of_type(t) == kind));
        if !typed || values.is_some_and(|values| values.iter().all(|v| Kind::of(v) != kind)) {
            self.nodes[node].all = false;
            return;
        }
        let mut all = Vec::new();
        if values.is_none() && kind != Kind::Scalar {
            // What a value may be without, too, must not be begun if it has no end.
            inside(part).filter(|(key, _)| MEMBERS.contains(key)).for_each(|(_, member)| {
                self.any(member);
            });
            let members = if kind == Kind::Object { self.members(object) } else { self.items(object) };
            if !members.is_empty() {
                let own = self.node(true, &members);
                self.own.push((part, kind, own));
                all.push(own);
            }
        }
        let at = object.get("$ref").and_then(Value::as_str).and_then(|at| at.strip_prefix('#'));
        if let Some(target) = at.and_then(|at| self.root.pointer(at)) {
            all.push(self.of_kind(target, kind));
        }
        let list = |key| object.get(key).and_then(Value::as_array);
        for joined in list("allOf").into_iter().flatten() {
            all.push(self.of_kind(joined, kind));
        }
        for choice in ["anyOf", "oneOf"].into_iter().filter_map(list) {
            let choice: Vec<usize> = choice.iter().map(|one| self.of_kind(one, kind)).collect();
            all.push(self.node(false, &choice));
        }
        self.join(node, &all);
    }

    /// What an object cannot be without.
    fn members(&mut self, object: &'a Map<String, Value>) -> Vec<usize> {
        let named = |key: &str| object.get(key).and_then(Value::as_object);
        let properties = named("properties");
        let others =
            object.get("additionalProperties").filter(|_| named("patternProperties").is_none_or(Map::is_empty));
        let required = object.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut all = Vec::new();
        for name in required.iter().filter_map(Value::as_str) {
            if let Some(member) = properties.and_then(|p| p.get(name)).or(others) {
                all.push(self.any(member));
            }
        }
        let least = object.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
        if usize::try_from(least).is_ok_and(|least| least > required.len())
            && let Some(others) = others
        {
            let optional = properties.into_iter().flatten().filter(|(name, _)| !required.iter().any(|r| r == *name));
            let one: Vec<usize> = optional.map(|(_, s)| s).chain([others]).map(|s| self.any(s)).collect();
            all.push(self.node(false, &one));
        }
        all
    }

    /// What an array cannot be without.
    fn items(&mut self, object: &'a Map<String, Value>) -> Vec<usize> {
        let least = object.get("minItems").and_then(Value::as_u64).unwrap_or(0);
        let least = usize::try_from(least).unwrap_or(usize::MAX);
        // Drafts before 2020-12 have the first ones in `items`.
        let (first, rest) = match (object.get("prefixItems"), object.get("items")) {
            (Some(first), rest) => (first.as_array(), rest),
            (None, Some(Value::Array(first))) => (Some(first), object.get("additionalItems")),
            (None, rest) => (None, rest),
        };
        let first = first.map_or(&[][..], Vec::as_slice);
        let rest = rest.filter(|_| least > first.len());
        first.iter().take(least).chain(rest).map(|item| self.any(item)).collect()
    }

    /// The nodes that must be `what`, begun with those of no parts.
    fn spread(&self, what: bool) -> Vec<bool> {
        // How many of its parts must be it for a node to be it.
        let mut missing: Vec<usize> =
            self.nodes.iter().map(|n| if n.all == what { n.parts } else { n.parts.min(1) }).collect();
        let mut is = vec![false; self.nodes.len()];
        let mut new: Vec<usize> =
            (0..is.len()).filter(|n| self.nodes[*n].parts == 0 && self.nodes[*n].all == what).collect();
        new.iter().for_each(|n| is[*n] = true);
        while let Some(node) = new.pop() {
            for &above in &self.nodes[node].part_of {
                missing[above] = missing[above].saturating_sub(1);
                if missing[above] == 0 && !is[above] {
                    is[above] = true;
                    new.push(above);
                }
            }
        }
        is
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Specials;
    use crate::test_support::starter_tokenizer;

    /// Whether each of these texts is a whole answer.
    fn accepts(schema: &Value, texts: &[&str]) -> Vec<bool> {
        let tokenizer = starter_tokenizer();
        let held = tokenizer.grammars().and_then(|g| g.schema(schema)).unwrap_or_else(|e| panic!("{e}: {schema}"));
        let whole = |text: &&str| {
            let mut held = held.clone();
            let tokens = tokenizer.encode(text, Specials::Plain).into_iter().chain(tokenizer.eos());
            tokens.into_iter().all(|token| {
                let permitted = held.permits(token).expect("a verdict");
                held.take(token);
                permitted
            })
        };
        texts.iter().map(whole).collect()
    }

    fn node(x: Value) -> Value {
        json!({"type": "object", "properties": {"x": x}, "required": ["x"], "additionalProperties": false})
    }

    #[test]
    fn a_schema_without_any_value_that_ends_is_refused() {
        let itself = json!({"$ref": "#"});
        let def = |a: Value| json!({"$ref": "#/$defs/a", "$defs": {"a": a, "b": node(json!({"$ref": "#/$defs/a"}))}});
        for schema in [
            node(itself.clone()),
            def(node(json!({"$ref": "#/$defs/a"}))),
            def(node(json!({"$ref": "#/$defs/b"}))),
            def(json!({"$ref": "#/$defs/b"})),
            node(json!({"anyOf": [itself, node(itself.clone())]})),
            node(json!({"type": "array", "items": itself, "minItems": 1})),
            node(json!({"type": "array", "prefixItems": [{"type": "string"}, itself], "minItems": 2})),
            json!({"type": "array", "items": itself, "minItems": 2}),
            json!({"type": "object", "required": ["x"], "additionalProperties": itself}),
            json!({"type": "object", "minProperties": 1, "additionalProperties": itself}),
            json!({"allOf": [{"type": "object"}, {"required": ["x"], "properties": {"x": itself}}]}),
            json!({"type": "object", "allOf": [{"required": ["x"]}], "properties": {"y": {}},
                "anyOf": [{"required": ["y"], "properties": {"y": itself}}, {"required": ["z"], "properties": {"z": itself}}]}),
        ] {
            let held = starter_tokenizer().grammars().and_then(|g| g.schema(&schema)).map(|_| ());
            let why = held.expect_err(&schema.to_string()).0;
            assert!(why.starts_with("nothing can follow it") && why.contains("without end"), "{schema}: {why}");
        }
    }

    #[test]
    fn what_can_end_is_as_it_was() {
        let itself = json!({"$ref": "#"});
        for (schema, texts) in [
            (
                json!({"type": "object", "properties": {"x": itself}, "additionalProperties": false}),
                vec![r#"{"x": {"x": {}}}"#, "{}"],
            ),
            (node(json!({"anyOf": [itself, {"type": "null"}]})), vec![r#"{"x": {"x": null}}"#]),
            (node(json!({"type": "array", "items": itself})), vec![r#"{"x": [{"x": []}]}"#]),
            (node(json!({"type": ["string", "object"], "properties": {"x": itself}})), vec![r#"{"x": "y"}"#]),
            (json!({"required": ["x"], "properties": {"x": {"type": "integer"}}}), vec![r#"{"x": 1}"#, "3"]),
            (json!({"type": "array", "prefixItems": [itself], "items": false}), vec!["[]", "[[]]"]),
            (json!({"const": {"x": 1}, "type": "object"}), vec![r#"{"x": 1}"#]),
            (
                json!({"type": "object", "required": ["x"], "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": itself}),
                vec![r#"{"x": null}"#],
            ),
        ] {
            let mut fitted = schema.clone();
            crate::refs::resolve(&mut fitted).unwrap();
            let before = fitted.clone();
            assert_eq!((only(&mut fitted), &fitted), (Ok(()), &before), "nothing is left out");
            assert!(accepts(&schema, &texts).into_iter().all(|a| a), "{schema}");
        }
    }

    #[test]
    fn what_has_no_end_is_not_begun() {
        let endless = json!({"$ref": "#/$defs/endless"});
        let with = |mut schema: Value| {
            schema["$defs"] = json!({"endless": node(endless.clone())});
            schema
        };
        let optional = with(
            json!({"type": "object", "properties": {"x": endless, "y": {"type": "integer"}}, "additionalProperties": false}),
        );
        assert_eq!(accepts(&optional, &[r#"{"y": 1}"#, "{}"]), [true, true]);
        let any = with(json!({"anyOf": [endless, {"type": "integer"}]}));
        assert_eq!(accepts(&any, &["1"]), [true]);
        let list = with(json!({"type": "array", "items": endless}));
        assert_eq!(accepts(&list, &["[]"]), [true]);
        let either = json!({"type": ["object", "integer", "null"], "required": ["x"], "properties": {"x": {"type": "object", "required": ["y"],
            "properties": {"y": {"$ref": "#/properties/x"}}}}});
        assert_eq!(accepts(&either, &["1", "null"]), [true, true]);
        for (schema, begun) in [(&optional, r#"{"x"#), (&any, "{"), (&list, "[{"), (&either, "{")] {
            let tokenizer = starter_tokenizer();
            let mut held = tokenizer.grammars().and_then(|g| g.schema(schema)).unwrap();
            let refused = tokenizer.encode(begun, Specials::Plain).into_iter().any(|token| {
                let permitted = held.permits(token).expect("a verdict");
                held.take(token);
                !permitted
            });
            assert!(refused, "{schema}");
        }
    }

    #[test]
    fn a_long_chain_takes_no_stack_and_no_time() {
        // In an order in which each is looked at before the one that decides about it.
        let next = |i: usize| (format!("d{i}"), node(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
        for (last, ends) in [(json!({"type": "null"}), true), (json!({"$ref": "#/$defs/d0"}), false)] {
            let defs: Map<String, Value> = (0..1900).map(next).chain([("d1900".to_owned(), last)]).collect();
            let mut schema = json!({"$ref": "#/$defs/d0", "$defs": defs});
            let begun = std::time::Instant::now();
            assert_eq!(only(&mut schema).is_ok(), ends);
            assert!(begun.elapsed().as_millis() < 500, "{:?}", begun.elapsed());
        }
    }
}
