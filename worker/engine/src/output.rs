//! The text side of one request: bytes of tokens in, text that may be shown out.

/// Provisional until ds4-text's stream lands.
pub(crate) struct Output {
    stops: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Output {
    /// With the request's stop strings.
    pub fn new(stops: Vec<Vec<u8>>) -> Self {
        Self { stops, held: Vec::new() }
    }

    /// Adds a token's bytes; returns what may be shown and whether a stop string was met.
    pub fn push(&mut self, bytes: &[u8]) -> (String, bool) {
        self.held.extend_from_slice(bytes);
        let hit = self.stops.iter().filter_map(|s| self.held.windows(s.len()).position(|w| w == &s[..])).min();
        if let Some(at) = hit {
            self.held.truncate(at);
            return (self.finish(), true);
        }
        let partial =
            self.stops.iter().flat_map(|s| (1..s.len()).filter(|&n| self.held.ends_with(&s[..n]))).max().unwrap_or(0);
        let mut end = self.held.len() - partial;
        if let Err(e) = std::str::from_utf8(&self.held[..end])
            && e.error_len().is_none()
        {
            end = e.valid_up_to();
        }
        let rest = self.held.split_off(end);
        let text = String::from_utf8_lossy(&std::mem::replace(&mut self.held, rest)).into_owned();
        (text, false)
    }

    /// What is still held back.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}
