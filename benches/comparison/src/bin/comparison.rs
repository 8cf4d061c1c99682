//! Answers the questions that its arguments name, or all of them.
//!
//! ```sh
//! comparison [--rounds N] [--quick] [--long] [--charts FOLDER] [--redisson CLASSPATH]
//!     [--curator CLASSPATH] [--counted PROGRAM] [NAME ..]
//! ```

use std::process::ExitCode;

use tower_lock_comparison::{
    contender::{self, Work},
    load,
    questions::{
        Run, cluster, growth, hot_key, http, layer, memory, mysql, one_thread, postgres, redis_cycles, redlock,
        replicas, runtime, sessions, several_keys, shares,
    },
    report::Goals,
    web,
};
use tower_lock_testkit::RedisServer;

/// Answers a question, and adds its goals.
type Question = (&'static str, fn(&mut Run));

const QUESTIONS: [Question; 14] = [
    ("redis_cycles", redis_cycles::answer),
    ("replicas", replicas::answer),
    ("cluster", cluster::answer),
    ("redlock", redlock::answer),
    ("hot_key", hot_key::answer),
    ("several_keys", several_keys::answer),
    ("shares", shares::answer),
    ("postgres", postgres::answer),
    ("mysql", mysql::answer),
    ("sessions", sessions::answer),
    ("memory", memory::answer),
    ("http", http::answer),
    ("layer", layer::answer),
    ("growth", growth::answer),
];

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        // The roles of child processes.
        ["web", redis] => runtime().block_on(web::serve(redis)),
        ["load", mode, port, path, seconds] => one_thread().block_on(async {
            let (port, seconds) = (port.parse().expect("a port"), seconds.parse().expect("a number"));
            match mode {
                "open" => load::open(port, path, seconds).await.print(),
                _ => load::closed(port, path, 64, seconds).await.print(),
            }
        }),
        ["contender", lock, redis, ref work @ ..] => {
            runtime().block_on(contender::contend(lock, redis, Work::parse(work).expect("numbers")));
        }
        ["count", question, variant, units] => {
            let units = units.parse().expect("a number");
            match question {
                "memory" => memory::count_cycles(variant, units),
                _ => layer::count_requests(variant, units),
            }
        }
        _ => return compare(&arguments),
    }
    ExitCode::SUCCESS
}

fn compare(arguments: &[&str]) -> ExitCode {
    let mut run = Run {
        rounds: 5,
        scale: 1.0,
        long: false,
        goals: Goals::default(),
        charts: None,
        counted: None,
        redisson: None,
        curator: None,
    };
    let mut chosen = Vec::new();
    let mut arguments = arguments.iter().copied();
    while let Some(argument) = arguments.next() {
        match argument {
            "--long" => run.long = true,
            "--counted" => run.counted = arguments.next().map(Into::into),
            "--redisson" => run.redisson = arguments.next().map(str::to_owned),
            "--curator" => run.curator = arguments.next().map(str::to_owned),
            "--rounds" => run.rounds = arguments.next().and_then(|rounds| rounds.parse().ok()).expect("a number"),
            "--quick" => (run.rounds, run.scale, run.charts) = (1, 0.2, None),
            "--charts" => run.charts = Some(arguments.next().expect("a folder").into()),
            name => match QUESTIONS.iter().find(|(known, _)| *known == name) {
                Some(question) => chosen.push(*question),
                None => {
                    let known = QUESTIONS.map(|(name, _)| name).join(" ");
                    eprintln!("no question is named {name}: {known}");
                    return ExitCode::from(2);
                }
            },
        }
    }
    if !RedisServer::is_available() {
        eprintln!("no redis-server: apt-get install redis-server, or set REDIS_SERVER");
        return ExitCode::from(2);
    }
    if chosen.is_empty() {
        chosen.extend(QUESTIONS);
    }
    for (_, answer) in chosen {
        answer(&mut run);
    }
    run.goals.print();
    ExitCode::SUCCESS
}
