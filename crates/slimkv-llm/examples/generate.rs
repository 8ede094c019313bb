//! Answers a question: `generate MODEL METHOD QUESTION`.

use std::io::Write;
use std::ops::ControlFlow;

use slimkv::Device;
use slimkv::cache::KvCache;
use slimkv_llm::{ChatMessage, GenerateOptions, LoadOptions, Model, Special};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [model, method, question] = &std::env::args().skip(1).collect::<Vec<_>>()[..] else {
        return Err("usage: generate MODEL METHOD QUESTION".into());
    };
    let model = Model::load(model, &LoadOptions::default())?;
    let mut cache = KvCache::new(method.parse()?, model.geometry(1), &Device::best())?;
    let prompt = model.chat_template().render(&[ChatMessage::user(question)])?;
    let prompt = model.tokenizer().encode(&prompt, Special::Prompt)?;
    let generation = model.generate(&prompt, &mut cache, &GenerateOptions::default(), &mut |text| {
        print!("{text}");
        let _ = std::io::stdout().flush();
        ControlFlow::Continue(())
    })?;
    println!(
        "\n[{} + {} tokens, {:.1} and {:.1} tokens/s, {} bytes of cache]",
        generation.prompt_tokens,
        generation.tokens.len(),
        generation.prefill_tokens_per_s(),
        generation.decode_tokens_per_s(),
        cache.bytes()
    );
    Ok(())
}
