//! Commands that the guide and an example show: they are run by a shell against a real service.

use std::process::Stdio;

use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
};
use tower_lock_testkit::wait::soon;

use crate::services::{Service, example};

async fn shell(script: &str) -> String {
    let output = soon("the end of the script", Command::new("sh").args(["-euc", script]).output()).await;
    let output = output.expect("sh runs");
    assert!(output.status.success(), "{script}\n{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn curl_is_available() -> bool {
    let is_available = std::process::Command::new("curl").arg("--version").output().is_ok();
    if !is_available {
        tower_lock_testkit::skipped("the commands of the guide", "curl");
    }
    is_available
}

/// A slow machine may start the second `curl` after the first claim has ended. Then it gets the
/// existing record, and another family is tried.
#[tokio::test]
async fn two_requests_of_the_guide_get_201_and_409() {
    if !curl_is_available() {
        return;
    }
    let page = include_str!("../../docs/guide/getting-started.md");
    let (_, block) = page.split_once("```sh\nclaim() {").expect("the commands");
    let script = format!("claim() {{{}", block.split("```").next().expect("its end"));
    assert!(script.contains("localhost:3000") && script.contains("\"family_id\":1,"), "{script}");
    let service = Service::start(example("reward_claim").await).await;
    let address = service.address();
    for family in 1.. {
        let script = script.replace("localhost:3000", address).replace("_id\":1,", &format!("_id\":{family},"));
        let shown = shell(&script).await;
        assert_eq!(shown.matches("HTTP/1.1 201 Created").count(), 1, "{shown}");
        if shown.contains("HTTP/1.1 409 Conflict") {
            for part in ["content-type: application/problem+json", "cache-control: no-store", "retry-after: "] {
                assert!(shown.contains(part), "{shown}");
            }
            let problem = r##"{"type":"https://docs.rs/tower-lock/latest/tower_lock/problem/#locked","title":"Resource is locked","status":409,"##;
            assert!(shown.contains(problem) && shown.contains("\"outcome\":\"not-started\""), "{shown}");
            break;
        }
        assert!(family < 20, "never at the same time: {shown}");
    }
    assert!(service.terminate().await.success());
}

/// The commands that a service prints, and the output of a shell that runs them.
async fn shown_by_printed_commands(name: &str) -> String {
    let mut service = example(name).await;
    let mut child = service.arg("--serve").stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut script = String::new();
    let next =
        async |lines: &mut tokio::io::Lines<_>| soon("a line", lines.next_line()).await.expect("text").expect("a line");
    while next(&mut lines).await != "Try it:" {}
    loop {
        let line = next(&mut lines).await;
        if line == "Ctrl-C stops." {
            break;
        }
        script += &format!("{line}\n");
    }
    let shown = shell(&script).await;
    child.kill().await.expect("it runs");
    shown
}

#[tokio::test]
async fn commands_that_the_reward_example_prints_work() {
    if !curl_is_available() {
        return;
    }
    let shown = shown_by_printed_commands("reward_claim").await;
    assert_eq!(shown.matches(" -> ").count(), 4, "{shown}");
    assert!(shown.matches("-> 201").count() >= 2, "{shown}");
    let records: Vec<_> = shown.lines().filter(|line| line.starts_with("[{\"id\":")).collect();
    assert_eq!(records.len(), 2, "the records of two families: {shown}");
    assert_eq!(records[0].matches("\"family_id\":1").count(), 1, "{shown}");
}

/// A slow machine may start the second `curl` after the first transfer has ended.
#[tokio::test]
async fn commands_that_the_transfer_example_prints_work() {
    if !curl_is_available() {
        return;
    }
    let shown = shown_by_printed_commands("transfer").await;
    assert_eq!(shown.matches(" -> ").count(), 4, "{shown}");
    assert!(shown.lines().take(2).all(|line| line.ends_with(" -> 200")), "both under the layer: {shown}");
    let balances = shown.matches("\"balance\":").count();
    assert!(balances == 5 && shown.contains("{\"balance\":100,\"id\":5}"), "{shown}");
}

#[tokio::test]
async fn commands_that_the_gateway_prints_work() {
    if !curl_is_available() {
        return;
    }
    let shown = shown_by_printed_commands("gateway").await;
    // Two of three within the plan, then all three with a wait.
    assert_eq!((shown.matches("-> 200").count(), shown.matches("-> 429").count()), (5, 1), "{shown}");
    assert!(shown.contains("#no-permit"), "{shown}");
}

#[tokio::test]
async fn commands_that_the_document_example_prints_work() {
    if !curl_is_available() {
        return;
    }
    let shown = shown_by_printed_commands("document").await;
    // The clients run at the same time: the body of one may be in the line of another.
    let versions: Vec<_> = shown.split('[').skip(1).filter_map(|text| text.split(']').next()).collect();
    assert_eq!((versions.len(), shown.matches(" -> ").count()), (7, 7), "{shown}");
    assert!(versions.iter().all(|text| ["1,1", "2,2", "3,3"].contains(text)), "{shown}");
}
