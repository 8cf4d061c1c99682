//! The checker process: listens on a free port, which it prints first, and ends after a finish
//! report, with exit code 1 if there were violations.
//!
//! `checker [--ignore-fences]`

use std::{
    io,
    net::Ipv4Addr,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::mpsc,
};
use tower_lock_storm::{Checker, Reply, Summary};

#[tokio::main(flavor = "current_thread")]
async fn main() -> io::Result<ExitCode> {
    let checker = match &*std::env::args().skip(1).collect::<Vec<_>>() {
        [] => Checker::new(),
        [flag] if flag == "--ignore-fences" => Checker::ignoring_fences(),
        other => panic!("unknown argument: {other:?}"),
    };
    let checker = Arc::new(Mutex::new(checker));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    println!("listening on {}", listener.local_addr()?);
    let (finish, mut finished) = mpsc::channel(1);
    loop {
        tokio::select! {
            arrived = listener.accept() => {
                let (stream, _) = arrived?;
                Handle::current().spawn(listen(Arc::clone(&checker), stream, finish.clone()));
            }
            summary = finished.recv() => {
                let summary: Summary = summary.expect("one is kept here");
                println!("{}", serde_json::to_string_pretty(&summary)?);
                return Ok(ExitCode::from(u8::from(!summary.violations.is_empty())));
            }
        }
    }
}

async fn listen(checker: Arc<Mutex<Checker>>, stream: TcpStream, finish: mpsc::Sender<Summary>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (from, mut to) = stream.into_split();
    let mut lines = BufReader::new(from).lines();
    while let Some(line) = lines.next_line().await? {
        let answer = {
            let mut checker = checker.lock().unwrap_or_else(PoisonError::into_inner);
            match line.parse() {
                Ok(report) => checker.record(report),
                Err(_) => checker.invalid_report(&line),
            }
        };
        to.write_all(format!("{answer}\n").as_bytes()).await?;
        if let Reply::Summary(json) = answer {
            let _ = finish.send(serde_json::from_str(&json)?).await;
        }
    }
    Ok(())
}
