//! How much a chat request wants the model to think, in every spelling that clients use.

use ds4_text::deepseek_v4::Thinking;

use crate::backend::ModelInfo;
use crate::error::ApiError;
use crate::json::{Fields, under, wrong_type};
use crate::tools::{object, required};

/// Why a model without reasoning refuses what asks for it, or tells of it.
pub(crate) const NO_REASONING: &str = "the served model has no reasoning mode";

/// Least context for the most effort: what the makers give it.
pub const MAX_EFFORT_CONTEXT: usize = 393_216;

/// Reads `thinking` (`true`, `false` or `{"type": "enabled" | "disabled"}`), `think`, `chat_template_kwargs` and
/// `reasoning_effort`. The switches say whether the model thinks, the effort how much; an effort of `none` is a switch too.
/// Said nowhere, it thinks. The most effort counts as high where the context is smaller than [`MAX_EFFORT_CONTEXT`]. `None`: the model has no such mode, and none was asked for.
///
/// # Errors
/// `invalid_type`, `invalid_value` (switches that contradict each other, an unknown effort), `unknown_parameter`,
/// `unsupported_parameter`.
pub fn thinking(fields: &mut Fields<'_>, model: &ModelInfo) -> Result<Option<Thinking>, ApiError> {
    let mut switch: Option<(String, bool)> = None;
    for (name, on) in [
        ("thinking".to_owned(), thinking_field(fields)?),
        ("think".to_owned(), fields.bool("think")?),
        template_switch(fields)?,
    ] {
        match (on, &switch) {
            (Some(on), Some((before, was))) if on != *was => {
                return Err(ApiError::invalid_value(&name, on, &format!("contradicts `{before}`, which is {was}")));
            }
            (Some(on), None) => switch = Some((name, on)),
            _ => {}
        }
    }
    let effort = fields.string("reasoning_effort")?;
    if !model.abilities.reasoning {
        return match (switch, effort.as_deref()) {
            (Some((name, true)), _) => Err(ApiError::unsupported(&name, format!("`{name}`: {NO_REASONING}"))),
            (_, Some(effort)) if effort != "none" => {
                Err(ApiError::unsupported("reasoning_effort", format!("`reasoning_effort`: {NO_REASONING}")))
            }
            _ => Ok(None),
        };
    }
    let wanted = match effort.as_deref() {
        None => Thinking::High,
        Some(word) => Thinking::from_effort(word).ok_or_else(|| {
            let shown: String = word.chars().take(32).collect();
            let rule = "must be none, minimal, low, medium, high, xhigh or max";
            ApiError::invalid_value("reasoning_effort", format!("`{shown}`"), rule)
        })?,
    };
    match switch {
        Some((name, false)) if effort.is_some() && wanted != Thinking::None => {
            let shown = effort.as_deref().unwrap_or_default();
            let rule = format!("contradicts `{name}`, which says not to think");
            return Err(ApiError::invalid_value("reasoning_effort", format!("`{shown}`"), &rule));
        }
        Some((_, false)) => return Ok(Some(Thinking::None)),
        Some((name, true)) if wanted == Thinking::None => {
            return Err(ApiError::invalid_value("reasoning_effort", "`none`", &format!("contradicts `{name}`")));
        }
        _ => {}
    }
    if wanted == Thinking::Max && model.context < MAX_EFFORT_CONTEXT {
        // Agents send their word for "think more" whatever the server is: it must not cost them the request.
        tracing::debug!(context = model.context, needs = MAX_EFFORT_CONTEXT, "reasoning_effort max counts as high");
        return Ok(Some(Thinking::High));
    }
    Ok(Some(wanted))
}

/// A boolean, or an object with a type.
fn thinking_field(fields: &mut Fields<'_>) -> Result<Option<bool>, ApiError> {
    let Some(raw) = fields.raw("thinking") else { return Ok(None) };
    match raw {
        "true" => return Ok(Some(true)),
        "false" => return Ok(Some(false)),
        _ if !raw.starts_with('{') => return Err(wrong_type("thinking", "a boolean or an object with a `type`", raw)),
        _ => {}
    }
    let mut object = object(raw, "thinking")?;
    let kind = required(&mut object, "type", "thinking")?;
    object
        .refuse("budget_tokens", &[], "there is no budget for reasoning alone; `max_tokens` bounds the whole answer")
        .map_err(|e| under("thinking", e))?;
    object.finish().map_err(|e| under("thinking", e))?;
    match kind.as_str() {
        "enabled" => Ok(Some(true)),
        "disabled" => Ok(Some(false)),
        other => {
            let other: String = other.chars().take(32).collect();
            Err(ApiError::invalid_value("thinking.type", format!("`{other}`"), "must be enabled or disabled"))
        }
    }
}

/// What clients of other servers say to a chat template, with the name that they said.
fn template_switch(fields: &mut Fields<'_>) -> Result<(String, Option<bool>), ApiError> {
    const AT: &str = "chat_template_kwargs";
    let Some(raw) = fields.raw(AT) else { return Ok((AT.into(), None)) };
    let mut object = object(raw, AT)?;
    let mut found = (AT.to_owned(), None);
    for name in ["thinking", "enable_thinking"] {
        if let Some(on) = object.bool(name).map_err(|e| under(AT, e))? {
            if found.1.is_some_and(|was| was != on) {
                return Err(ApiError::invalid_value(&format!("{AT}.{name}"), on, "contradicts its neighbour"));
            }
            found = (format!("{AT}.{name}"), Some(on));
        }
    }
    object.finish().map_err(|e| under(AT, e))?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model;
    use ds4_text::ChatAbilities;

    fn read(body: &str, context: usize, reasoning: bool) -> Result<Option<Thinking>, ApiError> {
        let mut fields = Fields::parse(body.as_bytes(), 16)?;
        let abilities = ChatAbilities { reasoning, ..ChatAbilities::default() };
        let thinking = thinking(&mut fields, &ModelInfo { context, abilities, ..model() })?;
        fields.finish()?;
        Ok(thinking)
    }

    #[test]
    fn every_spelling() {
        for (body, want) in [
            ("{}", Thinking::High),
            (r#"{"thinking":false}"#, Thinking::None),
            (r#"{"thinking":{"type":"disabled"}}"#, Thinking::None),
            (r#"{"thinking":{"type":"enabled"}}"#, Thinking::High),
            (r#"{"think":false}"#, Thinking::None),
            (r#"{"think":true,"thinking":true}"#, Thinking::High),
            (r#"{"reasoning_effort":"none"}"#, Thinking::None),
            (r#"{"reasoning_effort":"minimal"}"#, Thinking::High),
            (r#"{"reasoning_effort":"xhigh"}"#, Thinking::High),
            (r#"{"reasoning_effort":"max"}"#, Thinking::Max),
            (r#"{"reasoning_effort":"none","think":false}"#, Thinking::None),
            (r#"{"reasoning_effort":null,"think":false}"#, Thinking::None),
            (r#"{"chat_template_kwargs":{"thinking":false}}"#, Thinking::None),
            (r#"{"chat_template_kwargs":{"enable_thinking":true}}"#, Thinking::High),
        ] {
            assert_eq!(read(body, MAX_EFFORT_CONTEXT, true), Ok(Some(want)), "{body}");
        }
        let small = read(r#"{"reasoning_effort":"max"}"#, MAX_EFFORT_CONTEXT - 1, true);
        assert_eq!(small, Ok(Some(Thinking::High)));
        for body in ["{}", r#"{"thinking":false}"#, r#"{"reasoning_effort":"none"}"#] {
            assert_eq!(read(body, 8192, false), Ok(None), "{body}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_value() {
        for (body, param, code, shown) in [
            (r#"{"thinking":1}"#, "thinking", "invalid_type", "1"),
            (r#"{"thinking":{}}"#, "thinking.type", "missing_required_parameter", "thinking.type"),
            (r#"{"thinking":{"type":"often"}}"#, "thinking.type", "invalid_value", "often"),
            (
                r#"{"thinking":{"type":"enabled","budget_tokens":1}}"#,
                "thinking.budget_tokens",
                "unsupported_parameter",
                "max_tokens",
            ),
            (r#"{"thinking":true,"think":false}"#, "think", "invalid_value", "thinking"),
            (r#"{"thinking":true,"reasoning_effort":"none"}"#, "reasoning_effort", "invalid_value", "thinking"),
            (r#"{"thinking":false,"reasoning_effort":"high"}"#, "reasoning_effort", "invalid_value", "`high`"),
            (
                r#"{"thinking":{"type":"disabled"},"reasoning_effort":"minimal"}"#,
                "reasoning_effort",
                "invalid_value",
                "`thinking`",
            ),
            (r#"{"think":false,"reasoning_effort":"max"}"#, "reasoning_effort", "invalid_value", "`think`"),
            (
                r#"{"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low"}"#,
                "reasoning_effort",
                "invalid_value",
                "chat_template_kwargs.enable_thinking",
            ),
            (r#"{"reasoning_effort":"most"}"#, "reasoning_effort", "invalid_value", "most"),
            (r#"{"thinking":false,"reasoning_effort":"most"}"#, "reasoning_effort", "invalid_value", "must be none"),
            (r#"{"chat_template_kwargs":{"x":1}}"#, "chat_template_kwargs.x", "unknown_parameter", "x"),
        ] {
            let e = read(body, 8192, true).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), code), "{body}: {}", e.message);
            assert!(e.message.contains(shown), "{shown} in {}", e.message);
        }
        for (body, param) in [
            (r#"{"thinking":{"type":"enabled"}}"#, "thinking"),
            (r#"{"think":true}"#, "think"),
            (r#"{"reasoning_effort":"high"}"#, "reasoning_effort"),
        ] {
            let e = read(body, 8192, false).unwrap_err();
            assert_eq!((e.param.as_deref(), e.code), (Some(param), "unsupported_parameter"));
        }
    }
}
