//! The tokenizer of a directory: `tokenizer.json` and what stands beside it.

use serde_json::Value;

use super::{AddedTokens, Dialect, Piece, Tokenizer, ends};
use crate::weights::Directory;
use crate::{Error, Result};

const FILE: &str = "tokenizer.json";
/// More tokens than any vocabulary has; a larger id is a broken file, not a reason to allocate.
const MAX_ID: u64 = 1 << 24;

impl Tokenizer {
    pub(crate) fn from_directory(directory: &Directory) -> Result<Tokenizer> {
        let file = directory.path.join(FILE);
        let mut json = directory.json(FILE)?;
        let bad = |key: &str, expected: &str, found: &Value| {
            let mut found = found.to_string();
            found.truncate(found.char_indices().nth(60).map_or(found.len(), |(at, _)| at));
            Error::Value { file: file.clone(), key: key.into(), expected: expected.into(), found }
        };
        let expected = "a byte-level or byte-fallback decoder";
        let dialect = dialect(&json).ok_or_else(|| bad("decoder", expected, &json["decoder"]))?;
        let vocab = json["model"]["vocab"]
            .as_object()
            .filter(|_| json["model"]["type"].as_str().is_none_or(|kind| kind == "BPE"))
            .ok_or_else(|| bad("model.type", "`BPE`", &json["model"]["type"]))?;

        let mut pieces = Vec::<Piece>::new();
        let mut put = |id: &Value, text: &str, bytes: Vec<u8>| -> Result<u32> {
            let index = id.as_u64().filter(|&id| id < MAX_ID).ok_or_else(|| bad("id", "a token number", id))?;
            pieces.resize_with(pieces.len().max(index as usize + 1), Piece::default);
            pieces[index as usize] = Piece { text: text.into(), bytes };
            Ok(index as u32)
        };
        for (text, id) in vocab {
            put(id, text, dialect.spell(text))?;
        }
        let mut added = AddedTokens::default();
        let mut control = Vec::new();
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let text = token["content"].as_str().ok_or_else(|| bad("added_tokens", "texts", &token["content"]))?;
            let special = token["special"].as_bool().unwrap_or(false);
            let id = put(&token["id"], text, if special { Vec::new() } else { text.into() })?;
            added.insert(text, id, special);
            if special {
                control.push((id, text.to_string()));
            }
        }

        let settings = directory.json_if_there("tokenizer_config.json")?.unwrap_or(Value::Null);
        let id_of = |text: &str| pieces.iter().position(|piece| piece.text == text).map(|id| id as u32);
        let first = first_of_template(&json["post_processor"]).and_then(|text| id_of(&text));
        let bos = token_text(&settings["bos_token"]).and_then(id_of).or(first);
        let add_bos = settings["add_bos_token"].as_bool().unwrap_or(first.is_some());
        let named = token_text(&settings["eos_token"]).and_then(id_of);
        let eos = ends(named.into_iter().chain(configured_ends(directory)?), control.into_iter());

        // All of this is done here, so that plain text can be told from control tokens.
        for key in ["added_tokens", "post_processor", "truncation", "padding"] {
            json[key] = if key == "added_tokens" { Value::Array(Vec::new()) } else { Value::Null };
        }
        let inner = tokenizers::Tokenizer::from_bytes(json.to_string()).map_err(|e| Error::Format {
            file: file.clone(),
            expected: "a tokenizer",
            found: e.to_string(),
        })?;
        Ok(Tokenizer { inner, pieces, added, dialect, bos, eos, add_bos })
    }
}

fn dialect(json: &Value) -> Option<Dialect> {
    let steps = steps(&json["decoder"], "decoders");
    let has = |kind: &str| steps.iter().any(|step| step["type"] == kind);
    if has("ByteLevel") {
        return Some(Dialect::ByteLevel);
    }
    has("ByteFallback").then_some(Dialect::SentencePiece { prefix_space: has("Strip") })
}

/// A sequence as its steps, and a single step as itself.
fn steps<'a>(value: &'a Value, list: &str) -> Vec<&'a Value> {
    match value[list].as_array() {
        Some(steps) => steps.iter().collect(),
        None => vec![value],
    }
}

/// The special token that the post-processor puts before a sequence.
fn first_of_template(processor: &Value) -> Option<String> {
    let steps = steps(processor, "processors");
    let template = steps.into_iter().find(|step| step["type"] == "TemplateProcessing")?;
    template["single"][0]["SpecialToken"]["id"].as_str().map(String::from)
}

/// A token in `tokenizer_config.json`: text, or an object around it.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

/// The end tokens of `generation_config.json`, else of `config.json`: one number or several.
fn configured_ends(directory: &Directory) -> Result<Vec<u32>> {
    for file in ["generation_config.json", "config.json"] {
        let ids = directory.json_if_there(file)?.map(|config| config["eos_token_id"].clone()).unwrap_or(Value::Null);
        let ids: Vec<u32> = match &ids {
            Value::Array(ids) => ids.iter().filter_map(Value::as_u64).map(|id| id as u32).collect(),
            id => id.as_u64().map(|id| id as u32).into_iter().collect(),
        };
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}
