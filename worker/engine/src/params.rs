//! The ranges that sampling parameters must keep.

use crate::request::{EngineError, SamplingParams};

fn require<T: std::fmt::Display>(
    ok: bool,
    name: &'static str,
    value: T,
    rule: &'static str,
) -> Result<(), EngineError> {
    if ok { Ok(()) } else { Err(EngineError::BadParameter { name, value: value.to_string(), rule }) }
}

impl SamplingParams {
    /// Greedy decoding.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every range. NaN and infinities lie in none.
    ///
    /// # Errors
    /// [`EngineError::BadParameter`] with the parameter, its value and the rule.
    pub fn validate(&self) -> Result<(), EngineError> {
        let within = |x: f32, lo: f32, hi: f32| x >= lo && x <= hi;
        require(within(self.temperature, 0.0, 2.0), "temperature", self.temperature, "must be between 0 and 2")?;
        require(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "must be above 0 and at most 1")?;
        require(within(self.min_p, 0.0, 1.0), "min_p", self.min_p, "must be between 0 and 1")?;
        for (name, value) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            require(within(value, -2.0, 2.0), name, value, "must be between -2 and 2")?;
        }
        require(
            self.repetition_penalty > 0.0 && self.repetition_penalty <= 10.0,
            "repetition_penalty",
            self.repetition_penalty,
            "must be above 0 and at most 10",
        )?;
        for (_, bias) in &self.logit_bias {
            require(within(*bias, -100.0, 100.0), "logit_bias", bias, "must be between -100 and 100")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_parameter_value_and_rule() {
        let cases: [(&str, SamplingParams, &str); 8] = [
            ("temperature", SamplingParams { temperature: -0.5, ..Default::default() }, "-0.5"),
            ("temperature", SamplingParams { temperature: f32::NAN, ..Default::default() }, "NaN"),
            ("top_p", SamplingParams { top_p: 0.0, ..Default::default() }, "0"),
            ("min_p", SamplingParams { min_p: 1.5, ..Default::default() }, "1.5"),
            ("frequency_penalty", SamplingParams { frequency_penalty: 2.5, ..Default::default() }, "2.5"),
            ("presence_penalty", SamplingParams { presence_penalty: f32::INFINITY, ..Default::default() }, "inf"),
            ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..Default::default() }, "0"),
            ("logit_bias", SamplingParams { logit_bias: vec![(1, 101.0)], ..Default::default() }, "101"),
        ];
        for (want, params, shown) in cases {
            match params.validate() {
                Err(EngineError::BadParameter { name, value, rule }) => {
                    assert_eq!(name, want);
                    assert_eq!(value, shown);
                    assert!(rule.starts_with("must be"));
                }
                other => panic!("{want}: {other:?}"),
            }
        }
        assert_eq!(SamplingParams::default().validate(), Ok(()));
        assert_eq!(SamplingParams::greedy().validate(), Ok(()));
    }
}
