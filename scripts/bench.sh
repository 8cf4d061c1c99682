#!/usr/bin/env bash
# Compares tower-lock with other locks: the same work, interleaved in one run.
#
#   scripts/bench.sh                 all questions, about ten minutes on two cores
#   scripts/bench.sh NAME ..         these questions: redis_cycles, memory
#   scripts/bench.sh --quick NAME    one short round: it shows that the programs work
#   scripts/bench.sh --rounds N ..   more rounds, for closer results
#   scripts/bench.sh --charts ..     also draws docs/benchmarks/*.svg
#
# The last lines are `goal NAME VALUE TARGET ok`, or `short` at their end. The machine should have
# nothing else to do. benches/comparison/README.md explains the questions.
set -euo pipefail
cd "$(dirname "$0")/.."

arguments=()
for argument in "$@"; do
    case $argument in
        --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit ;;
        --charts) arguments+=(--charts "$PWD/docs/benchmarks") ;;
        *) arguments+=("$argument") ;;
    esac
done

target=${CARGO_TARGET_DIR:-$PWD/target}/comparison
# From its own folder: another workspace and another lock file.
(cd benches/comparison && cargo build --quiet --release --locked --target-dir "$target")
"$target/release/comparison" "${arguments[@]}"
