//! `ds4 chat`: a conversation in the terminal.

use std::io::IsTerminal as _;
use std::path::PathBuf;

use anyhow::Context as _;
use ds4_os::show;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{DefaultEditor, Editor};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::client::WorkerArgs;
use crate::client::http::Server;
use crate::generate::{Generation, Heard, Sampling};

/// `ds4 chat`.
#[derive(clap::Args)]
#[command(after_help = "Ctrl-C stops the answer that is being written, Ctrl-D or /exit ends the conversation.\n\
    /help lists the commands inside.")]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Do not keep a history of typed lines
    #[arg(long)]
    no_history: bool,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    worker: WorkerArgs,
}

const HELP: &str = "\
/help            this list
/clear           forget the conversation (the system message stays)
/system [TEXT]   set the system message and forget the conversation; without TEXT remove it
/save FILE       write the conversation as JSON messages
/stats           toggle token counts and speeds after each answer
/exit            end (also Ctrl-D)
A line that ends with a backslash continues on the next one. Ctrl-C stops an answer.";

/// What a line of input asks for.
#[derive(Debug, PartialEq)]
enum Input {
    Nothing,
    Say(String),
    Help,
    Clear,
    System(Option<String>),
    Save(String),
    Stats,
    Exit,
    Unknown(String),
}

fn parse(line: &str) -> Input {
    let line = line.trim();
    if line.is_empty() {
        return Input::Nothing;
    }
    if !line.starts_with('/') {
        return Input::Say(line.into());
    }
    let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match command {
        "/help" | "/?" => Input::Help,
        "/clear" => Input::Clear,
        "/system" => Input::System((!rest.is_empty()).then(|| rest.into())),
        "/save" if !rest.is_empty() => Input::Save(rest.into()),
        "/save" => Input::Unknown("/save needs a file name".into()),
        "/stats" => Input::Stats,
        "/exit" | "/quit" | "/bye" => Input::Exit,
        _ => Input::Unknown(format!("{command} is not a command; /help lists them")),
    }
}

struct Conversation {
    system: Option<String>,
    turns: Vec<Value>,
}

impl Conversation {
    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.turns.iter().cloned()).collect()
    }
}

/// Runs until the user leaves.
pub fn chat(args: ChatArgs, runtime: &Runtime) -> anyhow::Result<()> {
    let server = runtime.block_on(args.worker.find())?;
    let model = runtime.block_on(model_name(&server))?;
    let mut editor = DefaultEditor::new().context("cannot read from this terminal")?;
    let history = history_file().filter(|_| !args.no_history);
    if let Some(path) = &history {
        let _ = editor.load_history(path);
    }
    let mut conversation = Conversation { system: args.system, turns: Vec::new() };
    let mut stats = false;
    show!("{model} at {}. /help lists commands, Ctrl-C stops an answer, Ctrl-D ends.\n", server.url())?;
    while let Some(line) = read_line(&mut editor)? {
        if !line.trim().is_empty() {
            let _ = editor.add_history_entry(line.trim_end());
        }
        match parse(&line) {
            Input::Nothing => {}
            Input::Help => show!("{HELP}\n")?,
            Input::Clear => {
                conversation.turns.clear();
                show!("Forgotten.\n")?;
            }
            Input::System(text) => {
                show!("{}\n", if text.is_some() { "System message set." } else { "System message removed." })?;
                conversation = Conversation { system: text, turns: Vec::new() };
            }
            Input::Save(path) => match save(&path, &conversation) {
                Ok(()) => show!("Wrote {} messages to {path}.\n", conversation.messages().len())?,
                Err(e) => show!("{e:#}\n")?,
            },
            Input::Stats => {
                stats = !stats;
                show!("Statistics are {}.\n", if stats { "on" } else { "off" })?;
            }
            Input::Exit => break,
            Input::Unknown(why) => show!("{why}\n")?,
            Input::Say(text) => {
                conversation.turns.push(json!({"role": "user", "content": text}));
                match runtime.block_on(answer(&server, &args.sampling, &conversation, stats)) {
                    Ok(turn) => conversation.turns.push(turn),
                    Err(error) => {
                        // The turn is taken back, so that the conversation stays one that a template accepts.
                        conversation.turns.pop();
                        show!("{error:#}\n")?;
                    }
                }
            }
        }
    }
    if let Some(path) = &history {
        if let Some(dir) = path.parent() {
            let _ = std::fs::create_dir_all(dir);
        }
        if let Err(e) = editor.save_history(path) {
            ds4_os::say!("ds4: the history was not kept in {}: {e}", path.display());
        }
    }
    Ok(())
}

/// One logical line, joined over trailing backslashes; `None` at the end of input.
fn read_line(editor: &mut Editor<(), FileHistory>) -> anyhow::Result<Option<String>> {
    let mut text = String::new();
    loop {
        match editor.readline(if text.is_empty() { "> " } else { ". " }) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(start) => {
                    text.push_str(start);
                    text.push('\n');
                }
                None => return Ok(Some(text + &line)),
            },
            // Ctrl-C while typing drops the line, not the conversation.
            Err(ReadlineError::Interrupted) => {
                text.clear();
                show!("(Ctrl-D or /exit ends)\n")?;
            }
            Err(ReadlineError::Eof) => return Ok(None),
            Err(e) => return Err(e).context("cannot read from this terminal"),
        }
    }
}

/// Streams the answer to the terminal, reasoning in faint letters where there are any; Ctrl-C ends it and keeps what was
/// written. Gives the assistant's message.
async fn answer(
    server: &Server,
    sampling: &Sampling,
    conversation: &Conversation,
    stats: bool,
) -> anyhow::Result<Value> {
    let body = sampling.chat_body(&conversation.messages());
    let (faint, plain) = if std::io::stdout().is_terminal() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    let (mut text, mut reasoning) = (String::new(), String::new());
    let work = async {
        let mut generation = Generation::start(server, &body).await?;
        while let Some(heard) = generation.next().await? {
            match heard {
                Heard::Text(piece) => {
                    if text.is_empty() && !reasoning.is_empty() {
                        show!("\n\n")?;
                    }
                    show!("{piece}")?;
                    text.push_str(&piece);
                }
                Heard::Reasoning(piece) => {
                    show!("{faint}{piece}{plain}")?;
                    reasoning.push_str(&piece);
                }
                Heard::Call(piece) => show!("{faint}{piece}{plain}")?,
            }
        }
        show!("\n")?;
        if let Some(line) = generation.summary().line().filter(|_| stats) {
            show!("[{line}]\n")?;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        result = work => result?,
        _ = tokio::signal::ctrl_c() => show!(" [stopped]\n")?,
    }
    let mut turn = json!({"role": "assistant", "content": text});
    // Only of a model that reasons; others refuse the field.
    if !reasoning.is_empty() {
        turn["reasoning_content"] = reasoning.into();
    }
    Ok(turn)
}

async fn model_name(server: &Server) -> anyhow::Result<String> {
    let models = server.get("/v1/models").await?.json()?;
    let name = models.pointer("/data/0/id").and_then(Value::as_str);
    Ok(name.context("the server lists no model")?.to_string())
}

fn save(path: &str, conversation: &Conversation) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(&json!({"messages": conversation.messages()}))?;
    std::fs::write(path, text + "\n").with_context(|| format!("cannot write {path}"))
}

/// `$XDG_STATE_HOME/ds4/chat_history`, by default under `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".local/state")))?;
    Some(state.join("ds4/chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        assert_eq!(parse("  "), Input::Nothing);
        assert_eq!(parse(" hi there "), Input::Say("hi there".into()));
        assert_eq!(parse("/system be brief"), Input::System(Some("be brief".into())));
        assert_eq!(parse("/system"), Input::System(None));
        assert_eq!(parse("/save a b.json"), Input::Save("a b.json".into()));
        assert!(matches!(parse("/save"), Input::Unknown(_)));
        assert_eq!(parse("/quit"), Input::Exit);
        assert!(matches!(parse("/nope x"), Input::Unknown(why) if why.starts_with("/nope is not")));
    }

    #[test]
    fn the_system_message_comes_first() {
        let conversation = Conversation { system: Some("s".into()), turns: vec![json!({"role": "user"})] };
        assert_eq!(conversation.messages()[0]["role"], "system");
        assert_eq!(conversation.messages().len(), 2);
    }
}
