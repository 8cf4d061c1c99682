//! Answers the questions that its arguments name, or all of them.
//!
//! ```sh
//! comparison [--rounds N] [--quick] [--long] [--charts FOLDER] [NAME ..]
//! ```

use std::process::ExitCode;

use tower_lock_comparison::{
    questions::{Run, layer, memory, redis_cycles},
    report::Goals,
};
use tower_lock_testkit::RedisServer;

type Question = (&'static str, fn(&mut Run));

const QUESTIONS: [Question; 3] =
    [("redis_cycles", redis_cycles::answer), ("memory", memory::answer), ("layer", layer::answer)];

fn main() -> ExitCode {
    let mut run = Run { rounds: 5, scale: 1.0, goals: Goals::default(), charts: None };
    let mut chosen = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--rounds" => run.rounds = arguments.next().and_then(|rounds| rounds.parse().ok()).expect("a number"),
            "--quick" => (run.rounds, run.scale) = (1, 0.2),
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
