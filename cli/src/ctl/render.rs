//! One declaration of what a reply shows, for tables and for JSON.

use serde_json::{Map, Value};

/// A field: its JSON key and value, and how a person sees it.
pub struct Cell {
    key: &'static str,
    json: Value,
    text: Option<String>,
}

/// A field that people see as it is.
pub fn cell(key: &'static str, value: impl Into<Value>) -> Cell {
    let json = value.into();
    let text = match &json {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        other => other.to_string(),
    };
    Cell { key, json, text: Some(text) }
}

impl Cell {
    /// Shown to people in this form.
    pub fn shown(mut self, text: impl Into<String>) -> Self {
        self.text = Some(text.into());
        self
    }

    /// Left out of tables.
    pub fn hidden(mut self) -> Self {
        self.text = None;
        self
    }
}

/// A row as a JSON object.
pub fn object(cells: &[Cell]) -> Value {
    cells.iter().map(|c| (c.key.to_string(), c.json.clone())).collect::<Map<_, _>>().into()
}

/// A key as a heading: units are part of what people see in the value.
fn heading(key: &str) -> String {
    let bare = ["_s", "_ms", "_bytes"].iter().find_map(|unit| key.strip_suffix(unit)).unwrap_or(key);
    bare.replace('_', " ")
}

/// Rows as an aligned table with a heading; empty cells show `-`.
pub fn table(rows: &[Vec<Cell>]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let shown = |cell: &Cell| cell.text.is_some();
    let mut lines = vec![first.iter().filter(|c| shown(c)).map(|c| heading(c.key).to_uppercase()).collect()];
    lines.extend(rows.iter().map(|row| {
        row.iter().filter_map(|c| c.text.clone()).map(|t| if t.is_empty() { "-".into() } else { t }).collect::<Vec<_>>()
    }));
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| lines.iter().filter_map(|l| l.get(i)).map(|t| t.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    lines.iter().fold(String::new(), |out, line| {
        let padded: Vec<String> = line.iter().zip(&widths).map(|(t, w)| format!("{t:<w$}")).collect();
        out + padded.join("  ").trim_end() + "\n"
    })
}

/// A single row as `key  value` lines under a title.
pub fn sheet(title: &str, cells: &[Cell]) -> String {
    let rows: Vec<(String, &String)> = cells.iter().filter_map(|c| Some((heading(c.key), c.text.as_ref()?))).collect();
    let width = rows.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
    rows.iter().fold(format!("{title}\n"), |out, (key, text)| out + &format!("  {key:<width$}  {text}\n"))
}

/// Bytes in binary units.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut scale = 1024_u64;
    let mut unit = 0;
    while unit + 1 < UNITS.len() && n / scale >= 1024 {
        scale *= 1024;
        unit += 1;
    }
    // Tenths by integer arithmetic: exact at every size.
    let tenths = u128::from(n) * 10 / u128::from(scale);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// Seconds as `1d 2h`, `3h 4m`, `5m 6s` or `7s`.
pub fn age(seconds: u64) -> String {
    let (d, h, m, s) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    match (d, h, m) {
        (0, 0, 0) => format!("{s}s"),
        (0, 0, _) => format!("{m}m {s}s"),
        (0, _, _) => format!("{h}h {m}m"),
        _ => format!("{d}d {h}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(98_362_432), "93.8 MiB");
        assert_eq!(bytes(u64::MAX), "16777215.9 TiB");
        assert_eq!([age(7), age(306), age(11_040), age(93_600)], ["7s", "5m 6s", "3h 4m", "1d 2h"]);
    }

    #[test]
    fn tables_align_and_hide() {
        let row = |name: &'static str, n: u64| vec![cell("name", name), cell("age_s", n), cell("secret", 1).hidden()];
        assert_eq!(table(&[row("a", 1), row("long", 22)]), "NAME  AGE\na     1\nlong  22\n");
        assert_eq!(object(&row("a", 1)).to_string(), r#"{"name":"a","age_s":1,"secret":1}"#);
        assert_eq!(table(&[vec![cell("name", "")]]), "NAME\n-\n");
    }
}
