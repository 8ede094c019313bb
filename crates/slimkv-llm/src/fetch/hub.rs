//! The Hugging Face Hub.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ureq::Agent;
use ureq::http::{Response, StatusCode};

use super::Progress;
use super::download::{Origin, save};
use crate::Result;

/// A file on the Hub.
pub(super) struct Address<'a> {
    pub repository: &'a str,
    pub revision: &'a str,
    pub file: &'a str,
}

/// Downloads a file. Without a checksum of the caller's, the one that the Hub keeps of its large files is checked.
///
/// `HF_ENDPOINT` names another server, `HF_TOKEN` gives access to gated repositories.
pub(super) fn fetch(
    address: Address,
    sha256: Option<&str>,
    target: &Path,
    cancel: Option<&AtomicBool>,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let Address { repository, revision, file } = address;
    let endpoint = std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".into());
    let url = format!("{}/{repository}/resolve/{revision}/{file}", endpoint.trim_end_matches('/'));
    let origin = Origin { what: file, from: &url };
    on_progress(Progress::Connecting { source: url.clone() });

    // The answer to the first request carries the checksum; where it redirects to does not.
    let head = get(&agent(false), &url, &origin)?;
    let checksum = sha256.map(String::from).or_else(|| linked_sha256(&head));
    let size = header(&head, "x-linked-size").and_then(|size| size.parse().ok());
    let response = match head.status().is_redirection() {
        true => get(&agent(true), &url, &origin)?,
        false => head,
    };
    let total = size.or_else(|| header(&response, "content-length").and_then(|size| size.parse().ok()));
    let mut reader = response.into_body().into_with_config().limit(u64::MAX).reader();
    save(&mut reader, total, checksum.as_deref(), target, &origin, cancel, on_progress)
}

fn agent(follow: bool) -> Agent {
    Agent::config_builder()
        .max_redirects(if follow { 10 } else { 0 })
        .max_redirects_will_error(follow)
        .http_status_as_error(false)
        .timeout_connect(Some(Duration::from_secs(10)))
        .timeout_recv_response(Some(Duration::from_secs(30)))
        .build()
        .new_agent()
}

fn get(agent: &Agent, url: &str, origin: &Origin) -> Result<Response<ureq::Body>> {
    let mut request = agent.get(url);
    if let Some(token) = std::env::var("HF_TOKEN").ok().filter(|token| !token.is_empty()) {
        request = request.header("Authorization", format!("Bearer {token}"));
    }
    let response = request.call().map_err(|e| origin.failed(e))?;
    match response.status() {
        status if status.is_success() || status.is_redirection() => Ok(response),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            Err(origin.failed("access denied: no such repository, or one that needs a token in HF_TOKEN"))
        }
        status => Err(origin.failed(status)),
    }
}

fn header<'a>(response: &'a Response<ureq::Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

/// The Hub gives the sha256 of a large file as its entity tag.
fn linked_sha256(response: &Response<ureq::Body>) -> Option<String> {
    let tag = header(response, "x-linked-etag")?.trim_matches('"');
    (tag.len() == 64 && tag.bytes().all(|b| b.is_ascii_hexdigit())).then(|| tag.to_string())
}
