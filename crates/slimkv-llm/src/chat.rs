//! Chat templates: messages to the prompt that a model was trained on.

use minijinja::{Environment, ErrorKind, context};

use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl ChatMessage {
    /// A message of the system.
    pub fn system(content: impl Into<String>) -> Self {
        ChatMessage { role: "system".into(), content: content.into() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        ChatMessage { role: "user".into(), content: content.into() }
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        ChatMessage { role: "assistant".into(), content: content.into() }
    }
}

/// The Jinja template of a model, or a plain layout for models that have none.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: Option<String>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    pub(crate) fn new(source: Option<&str>, tokenizer: &Tokenizer) -> Result<Self> {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).unwrap_or_default().to_string();
        Ok(ChatTemplate {
            source: source.map(String::from),
            bos: text(tokenizer.bos()),
            eos: text(tokenizer.eos().first().copied()),
        })
    }

    /// Whether the model has no template, so that [`ChatTemplate::render`] writes `User: ... Assistant:`.
    pub fn is_fallback(&self) -> bool {
        self.source.is_none()
    }

    /// The prompt after which the model answers; encode it with [`Special::Prompt`](crate::Special::Prompt).
    pub fn render(&self, messages: &[ChatMessage]) -> Result<String> {
        let Some(source) = &self.source else { return Ok(plain(messages)) };
        let mut environment = Environment::new();
        // As Hugging Face's transformers sets Jinja up.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        let render = || {
            environment.template_from_str(source)?.render(context! {
                messages => messages,
                add_generation_prompt => true,
                bos_token => self.bos,
                eos_token => self.eos,
            })
        };
        render().map_err(|e| Error::Template(e.to_string()))
    }
}

fn plain(messages: &[ChatMessage]) -> String {
    let mut prompt = String::new();
    for ChatMessage { role, content } in messages {
        let name = match role.as_str() {
            "system" => "",
            "user" => "User: ",
            "assistant" => "Assistant: ",
            other => &format!("{other}: "),
        };
        prompt.push_str(&format!("{name}{content}\n\n"));
    }
    prompt + "Assistant:"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: Option<&str>) -> ChatTemplate {
        ChatTemplate { source: source.map(String::from), bos: "<s>".into(), eos: "</s>".into() }
    }

    #[test]
    fn chatml() {
        let source = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'].strip() \
                      + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
        let prompt = template(Some(source)).render(&[ChatMessage::system("S"), ChatMessage::user(" U ")]).unwrap();
        assert_eq!(prompt, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n");
    }

    #[test]
    fn an_exception_of_the_template_is_an_error_with_its_text() {
        let source =
            "{{ bos_token }}{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}";
        assert_eq!(template(Some(source)).render(&[ChatMessage::user("x")]).unwrap(), "<s>");
        let error = template(Some(source)).render(&[ChatMessage::system("x")]).unwrap_err();
        assert!(error.to_string().contains("user first"), "{error}");
        assert!(template(Some("{% if %}")).render(&[]).is_err());
    }

    #[test]
    fn without_a_template_the_layout_is_plain() {
        let messages = [ChatMessage::system("Be brief."), ChatMessage::user("Hi"), ChatMessage::assistant("Hello")];
        let prompt = template(None).render(&messages).unwrap();
        assert_eq!(prompt, "Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nAssistant:");
    }
}
