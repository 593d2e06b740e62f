//! What chat templates expect of Python: JSON, `str()`, dates and string methods as CPython has them.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// CPython's shortest `repr` of a float: exponent form below 1e-4 and from 1e16.
pub(crate) fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{f:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        e if f != 0.0 && !(-4..16).contains(&e) => {
            format!("{mantissa}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ => format!("{f:?}"),
    }
}

/// A number as Python prints it.
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(f) if !value.is_integer() => float_repr(f),
        _ => value.to_string(),
    }
}

/// `str(value)`: what `{{ value }}` prints.
pub(super) fn str_of(value: &Value) -> String {
    match value.as_str() {
        Some(s) => s.to_owned(),
        None => repr(value),
    }
}

/// `repr(value)`; undefined is empty, as Jinja prints it.
fn repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => {
            let s = value.as_str().unwrap_or_default();
            let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
            let mut out = String::from(quote);
            for c in s.chars() {
                match c {
                    '\\' => out += "\\\\",
                    '\n' => out += "\\n",
                    '\r' => out += "\\r",
                    '\t' => out += "\\t",
                    c if c == quote => {
                        out.push('\\');
                        out.push(c);
                    }
                    c if c < ' ' || c == '\u{7f}' => {
                        let _ = write!(out, "\\x{:02x}", u32::from(c));
                    }
                    c => out.push(c),
                }
            }
            out.push(quote);
            out
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().map(|i| i.map(|v| repr(&v)).collect()).unwrap_or_default();
            match (value.is_tuple(), items.len()) {
                (true, 1) => format!("({},)", items[0]),
                (true, _) => format!("({})", items.join(", ")),
                _ => format!("[{}]", items.join(", ")),
            }
        }
        ValueKind::Map if value.as_object().is_some() => {
            let keys = value.try_iter().map(|i| i.collect::<Vec<_>>()).unwrap_or_default();
            let pairs: Vec<String> = keys
                .iter()
                .map(|k| format!("{}: {}", repr(k), value.get_item(k).map(|v| repr(&v)).unwrap_or_default()))
                .collect();
            format!("{{{}}}", pairs.join(", "))
        }
        _ => value.to_string(),
    }
}

/// A JSON string as `json.dumps` writes it; `ensure_ascii` escapes everything but printable ASCII, as UTF-16 units.
pub(crate) fn json_string(s: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => *out += "\\\"",
            '\\' => *out += "\\\\",
            '\n' => *out += "\\n",
            '\r' => *out += "\\r",
            '\t' => *out += "\\t",
            '\u{8}' => *out += "\\b",
            '\u{c}' => *out += "\\f",
            c if c < ' ' || (ensure_ascii && !(' '..='~').contains(&c)) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Layout of [`to_json`], as the arguments of `json.dumps`.
struct Json {
    indent: Option<usize>,
    comma: String,
    colon: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Json {
    fn string(&self, s: &str, out: &mut String) {
        json_string(s, self.ensure_ascii, out);
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(n) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => *out += "null",
            ValueKind::Bool => *out += if value.is_true() { "true" } else { "false" },
            ValueKind::Number => {
                *out += &match number(value).as_str() {
                    "nan" => "NaN".to_owned(),
                    "inf" => "Infinity".to_owned(),
                    "-inf" => "-Infinity".to_owned(),
                    n => n.to_owned(),
                }
            }
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut empty = true;
                out.push('[');
                for item in value.try_iter()? {
                    if !empty {
                        *out += &self.comma;
                    }
                    empty = false;
                    self.line(depth + 1, out);
                    self.value(&item, depth + 1, out)?;
                }
                if !empty {
                    self.line(depth, out);
                }
                out.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                out.push('{');
                for (i, key) in keys.iter().enumerate() {
                    if i > 0 {
                        *out += &self.comma;
                    }
                    self.line(depth + 1, out);
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default(), out),
                        _ => {
                            let mut name = String::new();
                            self.value(key, 0, &mut name)?;
                            self.string(&name, out);
                        }
                    }
                    *out += &self.colon;
                    self.value(&value.get_item(key)?, depth + 1, out)?;
                }
                if !keys.is_empty() {
                    self.line(depth, out);
                }
                out.push('}');
            }
            kind => {
                return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON serializable")));
            }
        }
        Ok(())
    }
}

/// The filter `tojson`: `json.dumps` with `ensure_ascii=False`, as transformers defines it for chat templates.
pub(super) fn to_json(value: &Value, args: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = args.get("indent")?;
    let separators: Option<Vec<String>> = args.get("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators is a pair of strings")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let json = Json {
        indent,
        comma,
        colon,
        sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    json.value(value, 0, &mut out)?;
    Ok(out)
}

/// White space to `str.strip`: White_Space and the four information separators.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip(s: &str, chars: Option<&str>, start: bool, end: bool) -> String {
    let drop = |c: char| chars.map_or_else(|| is_python_space(c), |set| set.contains(c));
    let s = if start { s.trim_start_matches(drop) } else { s };
    let s = if end { s.trim_end_matches(drop) } else { s };
    s.to_owned()
}

/// The filter `trim`: `str.strip`.
pub(super) fn trim(value: &Value, chars: Option<String>) -> String {
    strip(&str_of(value), chars.as_deref(), true, true)
}

/// String methods that this module adds to, or corrects in, minijinja-contrib's `pycompat`.
pub(super) const METHODS: &[&str] =
    &["strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "rsplit", "partition", "rpartition", "index"];

/// Methods of Python's types on template values.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(s) = value.as_str().filter(|_| METHODS.contains(&name)) else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args);
    };
    let strings = |parts: [&str; 3]| Value::from(parts.map(Value::from).to_vec());
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            Value::from(strip(s, chars, name != "rstrip", name != "lstrip"))
        }
        "removeprefix" => {
            let (what,): (&str,) = from_args(args)?;
            Value::from(s.strip_prefix(what).unwrap_or(s))
        }
        "removesuffix" => {
            let (what,): (&str,) = from_args(args)?;
            Value::from(s.strip_suffix(what).unwrap_or(s))
        }
        "partition" | "rpartition" => {
            let (what,): (&str,) = from_args(args)?;
            match if name == "partition" { s.split_once(what) } else { s.rsplit_once(what) } {
                Some((a, b)) => strings([a, what, b]),
                None if name == "partition" => strings([s, "", ""]),
                None => strings(["", "", s]),
            }
        }
        "rsplit" => {
            let (what, most): (&str, Option<i64>) = from_args(args)?;
            let most = most.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
            let mut parts: Vec<Value> = s.rsplitn(most, what).map(Value::from).collect();
            parts.reverse();
            Value::from(parts)
        }
        _ => {
            let (what,): (&str,) = from_args(args)?;
            match s.find(what) {
                Some(at) => Value::from(s[..at].chars().count()),
                None => return Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
            }
        }
    })
}

/// `strftime_now(format)`: the present in UTC.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime(format, now)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// Formats seconds since 1970-01-01 UTC like `datetime.strftime` in the C locale.
fn strftime(format: &str, unix: u64) -> Result<String, Error> {
    let (days, second) = (unix / 86_400, unix % 86_400);
    let leap = |y: u64| (y.is_multiple_of(4) && !y.is_multiple_of(100)) || y.is_multiple_of(400);
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let of_year = day + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    // 1970-01-01 was a Thursday.
    let week_day = DAYS[usize::try_from((days + 3) % 7).unwrap_or(0)];
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let (month_number, month_day) = (month as u64 + 1, day + 1);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc's "-": no padding.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let two = |n: u64| if bare { n.to_string() } else { format!("{n:02}") };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month_number),
            Some('d') => two(month_day),
            Some('e') => format!("{month_day:2}"),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('j') if bare => of_year.to_string(),
            Some('j') => format!("{of_year:03}"),
            Some('B') => MONTHS[month].to_owned(),
            Some('b') => MONTHS[month][..3].to_owned(),
            Some('A') => week_day.to_owned(),
            Some('a') => week_day[..3].to_owned(),
            Some('F') => format!("{year}-{month_number:02}-{month_day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let what = format!("strftime_now: %{} is not supported", other.map_or_else(String::new, String::from));
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_known_instants() {
        // `date -u -d @N`
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %A %j", 0).expect("ok"), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(strftime("%d %b %Y", 951_782_400).expect("ok"), "29 Feb 2000");
        assert_eq!(strftime("%B %-d, %Y %I:%M %p %a", 1_709_208_000).expect("ok"), "February 29, 2024 12:00 PM Thu");
        assert_eq!(strftime("%F %T %j %y", 4_102_444_799).expect("ok"), "2099-12-31 23:59:59 365 99");
        assert!(strftime("%Q", 0).is_err());
    }

    #[test]
    fn floats_as_cpython_prints_them() {
        for (f, s) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
        ] {
            assert_eq!(float_repr(f), s);
        }
    }
}
