//! Which names a request may call this server by.
//!
//! A page of another site cannot read answers across origins, but its own name can be made to lead to 127.0.0.1 after it was loaded
//! (DNS rebinding): then they are its own origin's. Such a request carries that name as its host, so a server that only this
//! machine reaches takes no names that somebody else could have registered.

use hyper::StatusCode;
use hyper::header::{HOST, HeaderMap};

use crate::error::{ApiError, ErrorType};

/// Ends of names that nobody can register: RFC 6761, RFC 6762, RFC 8375, and ICANN's reservation of `internal`.
const PRIVATE: [&str; 5] = ["localhost", "local", "internal", "home.arpa", "test"];

/// Names that are taken.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    any: bool,
    more: Vec<String>,
}

impl Hosts {
    /// Whatever a request says: for servers that other machines are meant to reach.
    pub fn any() -> Self {
        Self { any: true, more: Vec::new() }
    }

    /// Addresses, names that nobody can register, and `more`.
    pub fn local(more: impl IntoIterator<Item = String>) -> Self {
        Self { any: false, more: more.into_iter().map(|name| canonical(&name)).collect() }
    }

    /// The refusal of a request with these headers, unless it is one for this server.
    pub(crate) fn refusal(&self, headers: &HeaderMap) -> Option<ApiError> {
        let host = String::from_utf8_lossy(headers.get(HOST)?.as_bytes());
        (!self.any && !self.takes(&host)).then(|| {
            ApiError::new(
                StatusCode::FORBIDDEN,
                ErrorType::InvalidRequest,
                "host_not_allowed",
                format!(
                    "this server is for its own machine, and the request calls it {host:?}, which a page of another site could do too: \
                     call it localhost or 127.0.0.1, or start the worker with --allow-host NAME (`ds4 serve ... -- --allow-host NAME`)"
                ),
            )
        })
    }

    fn takes(&self, host: &str) -> bool {
        let name = canonical(without_port(host));
        let private = |end: &&str| name.strip_suffix(*end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        // A name without dots is one of this network.
        !name.contains(['.', ':']) || address(&name) || PRIVATE.iter().any(private) || self.more.contains(&name)
    }
}

/// `[::1]:80`, `127.0.0.1:80` and `name:80` without their ports.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if port.bytes().all(|b| b.is_ascii_digit()) && (!name.contains(':') || name.ends_with(']')) =>
        {
            name
        }
        _ => host,
    }
}

fn canonical(name: &str) -> String {
    name.trim().trim_end_matches('.').to_ascii_lowercase()
}

/// An address leads where it says, whoever writes it.
fn address(name: &str) -> bool {
    let bare = name.strip_prefix('[').and_then(|n| n.strip_suffix(']')).unwrap_or(name);
    bare.parse::<std::net::IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_somebody_else_can_register_are_refused() {
        let hosts = Hosts::local(["Models.Example.org".to_owned()]);
        let taken = [
            "localhost",
            "localhost:8080",
            "LOCALHOST.",
            "127.0.0.1:8080",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "10.0.0.7:80",
            "box",
            "",
            "a.localhost:1",
            "host.docker.internal:8080",
            "box.local",
            "models.example.org:443",
            "models.example.org.",
        ];
        for host in taken {
            assert!(hosts.takes(host), "{host}");
        }
        let refused = [
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.nip.io",
            "notlocalhost.com",
            "a.b",
            "[::1].evil.example",
            "a.xlocal",
        ];
        for host in refused {
            assert!(!hosts.takes(host), "{host}");
        }
    }

    #[test]
    fn a_refusal_names_the_host_and_the_flag() {
        let mut headers = HeaderMap::new();
        assert!(Hosts::local([]).refusal(&headers).is_none(), "HTTP/1.0");
        headers.insert(HOST, "evil.example".parse().unwrap());
        let error = Hosts::local([]).refusal(&headers).unwrap();
        assert_eq!((error.status, error.code), (StatusCode::FORBIDDEN, "host_not_allowed"));
        assert!(
            error.message.contains("\"evil.example\"") && error.message.contains("--allow-host"),
            "{}",
            error.message
        );
        assert!(Hosts::any().refusal(&headers).is_none());
    }
}
