//! The `ds4` command where no server is needed.

use ds4_tests::{Sandbox, starter_model};

fn text(output: &std::process::Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn commands_without_a_server_say_so_with_exit_code_3() {
    let sandbox = Sandbox::new();
    for args in [&["ctl", "status"][..], &["ctl", "models"], &["ctl", "stop"], &["run", "-p", "hi"], &["chat"]] {
        let output = sandbox.run("ds4", args);
        let (_, errors) = text(&output);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {errors}");
        assert!(errors.contains(sandbox.dir().to_str().unwrap()), "{args:?}: {errors}");
    }
    let output = sandbox.run("ds4", &["run", "-p", "hi", "--url", "http://127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output).1);
}

#[test]
fn bad_usage_exits_with_2() {
    let sandbox = Sandbox::new();
    for args in [
        &["run"][..],
        &["run", "-p", ""],
        &["run", "-p", "x", "--top-p", "1.5"],
        &["run", "-p", "x", "--temp", "9"],
        &["run", "-p", "x", "--stop", ""],
        &["run", "-p", "x", "--url", "https://x"],
        &["pull", "no-such-model"],
        &["ctl", "nonsense"],
        &["serve", "--ctx", "many"],
    ] {
        assert_eq!(sandbox.run("ds4", args).status.code(), Some(2), "{args:?}");
    }
    // What the environment gives is not asked for.
    for (args, wanted) in [(&["run"][..], "--prompt <TEXT>"), (&["ctl", "load"], "<PATH>")] {
        let (_, errors) = text(&sandbox.run("ds4", args));
        assert!(errors.contains(wanted) && !errors.contains("--runtime-dir"), "{errors}");
        assert!(errors.contains(&format!("Usage: ds4 {}", args.join(" "))), "{errors}");
    }
}

#[test]
fn exit_codes_stay_where_nothing_can_be_written() {
    let sandbox = Sandbox::new();
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let code = |name: &str, args: &[&str]| {
        sandbox.command(name).args(args).stdout(full()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(code("ds4", &["ctl", "status"]), Some(3));
    assert_eq!(code("ds4", &["run", "-p", ""]), Some(2));
    assert_eq!(code("ds4-worker", &["--ctx", "1"]), Some(2));
    assert_eq!(code("ds4-worker", &[]), Some(3));
    assert_eq!(code("ds4-weight-owner", &["--model", "/nowhere.gguf"]), Some(4));
    assert_eq!(code("ds4-weight-owner", &["loader"]), Some(2));
    for (name, args) in
        [("ds4", &["config"][..]), ("ds4-worker", &["--print-config"]), ("ds4-weight-owner", &["--print-config"])]
    {
        assert_eq!(code(name, args), Some(1), "{name}: what was asked for was not written");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = sandbox.command(name).args(args).stdout(writer).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{name}: {}", text(&output).1);
    }
}

#[test]
fn help_completions_and_manual_come_from_one_table() {
    let sandbox = Sandbox::new();
    let (help, _) = text(&sandbox.run("ds4", &["serve", "--help"]));
    let (bash, _) = text(&sandbox.run("ds4", &["completions", "bash"]));
    let out = sandbox.dir().join("man");
    assert!(sandbox.run("ds4", &["man", "--out", out.to_str().unwrap()]).status.success());
    let manual = std::fs::read_to_string(out.join("ds4-serve.1")).unwrap();
    for flag in ["--model", "--http", "--ctx", "--start-attempts"] {
        assert!(help.contains(flag) && bash.contains(flag), "{flag}");
        assert!(manual.contains(&flag.replace('-', "\\-")), "{flag}: {manual}");
    }
    let (manual, _) = text(&sandbox.run("ds4", &["man"]));
    assert!(manual.starts_with(".ie") || manual.contains(".TH ds4 1"), "{manual}");
}

#[test]
fn pull_adopts_only_the_right_content_and_knows_what_it_has() {
    let sandbox = Sandbox::new();
    let dir = sandbox.dir().join("models");
    let wrong = sandbox.file("wrong.gguf", "GGUF");
    let args = |from: &std::path::Path| {
        ["pull", "--dir", dir.to_str().unwrap(), "--from", from.to_str().unwrap()].map(String::from)
    };
    let run = |args: [String; 5]| sandbox.run("ds4", &args.each_ref().map(String::as_str));
    let output = run(args(&wrong));
    assert_eq!(output.status.code(), Some(4), "{}", text(&output).1);
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing half-done is left");

    let output = run(args(&starter_model()));
    let (path, errors) = text(&output);
    assert!(output.status.success(), "{errors}");
    assert_eq!(std::fs::metadata(path.trim()).unwrap().len(), std::fs::metadata(starter_model()).unwrap().len());
    assert!(text(&run(args(&wrong))).1.contains("Already there"), "a right file needs no source");

    // A damaged file is not taken for the model.
    std::fs::File::options().write(true).open(path.trim()).unwrap().set_len(1000).unwrap();
    assert!(run(args(&starter_model())).status.success());
    assert_eq!(std::fs::metadata(path.trim()).unwrap().len(), std::fs::metadata(starter_model()).unwrap().len());
}

#[test]
fn config_shows_all_three_sections_with_their_sources() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("ds4.toml", "[worker]\nctx = 777\n");
    let args = ["config", "--config", file.to_str().unwrap(), "--threads", "3"];
    let output = sandbox.run("ds4", &args);
    let (shown, errors) = text(&output);
    assert!(output.status.success(), "{errors}");
    assert!(shown.contains("[serve]") && shown.contains("[owner]") && shown.contains("[worker]"), "{shown}");
    let line = |key: &str| shown.lines().find(|l| l.starts_with(key)).unwrap_or_else(|| panic!("no {key} in {shown}"));
    assert!(line("ctx = 777").contains("# file "), "{shown}");
    assert!(line("threads = 3").contains("# flag"), "{shown}");
    assert!(line("start-attempts = 5").contains("# default"), "{shown}");
}

#[test]
fn deepseek_v4_config_names_everything_that_is_wrong_in_all_sections() {
    let sandbox = Sandbox::new();
    let bad = "[wroker]\nx = 1\n[serve]\nfoo = 1\n[owner]\nbar = 1\n[worker]\nctx = \"a\"\nhtpp = 1\n";
    let file = sandbox.file("ds4.toml", bad);
    for command in ["config", "serve"] {
        let output = sandbox.run("ds4", &[command, "--config", file.to_str().unwrap()]);
        let (_, errors) = text(&output);
        assert_eq!(output.status.code(), Some(2), "{errors}");
        for wanted in ["`wroker`", "`foo`", "`bar`", "ctx = \"a\"", "`htpp`"] {
            assert_eq!(errors.matches(wanted).count(), 1, "{command}: {wanted} in {errors}");
        }
        assert_eq!(errors.lines().count(), 5, "{errors}");
    }
}

#[test]
fn config_names_the_runtime_directorys_own_source_in_every_section() {
    let sandbox = Sandbox::new();
    let (shown, _) = text(&sandbox.run("ds4", &["config"]));
    let sources: Vec<&str> = shown.lines().filter(|l| l.starts_with("runtime-dir = ")).collect();
    assert_eq!(sources.len(), 3, "{shown}");
    assert!(sources.iter().all(|l| l.ends_with("# environment DS4_RUNTIME_DIR")), "{shown}");
    let output = sandbox.run("ds4", &["config", "--runtime-dir", sandbox.dir().to_str().unwrap()]);
    assert_eq!(text(&output).0.matches("runtime-dir = ").count(), text(&output).0.matches(" # flag").count());
}

#[test]
fn config_tells_that_the_starter_model_is_served() {
    let sandbox = Sandbox::new();
    let cached = sandbox.dir().join("ds4/models");
    let config = || {
        let mut command = sandbox.command("ds4");
        text(&command.arg("config").env("XDG_CACHE_HOME", sandbox.dir()).output().unwrap()).0
    };
    assert!(!config().contains("starter model"), "{}", config());
    std::fs::create_dir_all(&cached).unwrap();
    let name = starter_model().file_name().unwrap().to_owned();
    std::fs::copy(starter_model(), cached.join(&name)).unwrap();
    assert!(config().contains(&format!("starter model, {}", cached.join(&name).display())), "{}", config());
}

#[test]
fn every_setting_is_in_the_documentation_with_its_default() {
    let sandbox = Sandbox::new();
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/configuration.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (shown, errors) = text(&sandbox.run("ds4", &["config"]));
    assert!(!shown.is_empty(), "{errors}");
    let mut rows = "";
    let mut settings = 0;
    for line in shown.lines() {
        if let Some(section) = line.strip_prefix('[') {
            let start = page.find(&format!("## [{section}")).unwrap_or_else(|| panic!("no {line} in the page"));
            rows = page[start + 3..].split("\n## ").next().unwrap();
            continue;
        }
        let unset = line.strip_prefix("# ").and_then(|l| l.strip_suffix(" is unset"));
        let Some(key) = unset.or_else(|| line.split_once(" = ").map(|(key, _)| key)) else { continue };
        let row = rows.lines().find(|r| r.starts_with(&format!("| `{key}` |")));
        let row = row.unwrap_or_else(|| panic!("{key} is not in the page's section:\n{rows}"));
        settings += 1;
        // These two depend on the machine.
        if let Some((_, rest)) = line.split_once(" = ").filter(|_| !["runtime-dir", "threads"].contains(&key)) {
            let default = rest.strip_suffix(" # default").unwrap_or_else(|| panic!("not a default: {line}"));
            assert!(row.contains(&format!("| `{default}` |")), "{key} has the default {default}; the page says {row}");
        }
    }
    assert!(settings > 30, "only {settings} settings were compared");
}

#[test]
fn l8_serve_refuses_an_unusable_runtime_directory_as_the_owner_does() {
    let sandbox = Sandbox::new();
    let file = sandbox.file("a-file", "x");
    let long = sandbox.dir().join("x".repeat(100));
    for dir in [file, long] {
        let answer = sandbox.run("ds4", &["serve", "--runtime-dir", dir.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&answer.stderr).into_owned();
        assert_eq!(answer.status.code(), Some(2), "{said}");
        assert!(said.contains("[runtime_dir]") && said.contains("--runtime-dir"), "{said}");
    }
}
