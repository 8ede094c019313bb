//! Evaluates cache methods on a text: `evaluate MODEL TEXT TOKENS METHOD...`, one JSON object a line.

use slimkv::Device;
use slimkv_llm::eval::{EvalOptions, evaluate};
use slimkv_llm::{LoadOptions, Model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [model, text, tokens, methods @ ..] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("usage: evaluate MODEL TEXT TOKENS METHOD...".into());
    };
    let model = Model::load(model, &LoadOptions::default())?;
    let text = std::fs::read_to_string(text)?;
    let methods = methods.iter().map(|m| m.parse()).collect::<Result<Vec<_>, _>>()?;
    let options = EvalOptions { tokens: tokens.parse()?, ..EvalOptions::default() };
    for row in evaluate(&model, &text, &methods, &Device::cpu(), &options, &mut |_| ())? {
        println!("{}", serde_json::to_string(&row)?);
    }
    Ok(())
}
