#!/usr/bin/env bash
# Compares tower-lock with other locks: the same work, interleaved in one run.
#
#   scripts/bench.sh                 all questions, about 33 minutes on two cores
#   scripts/bench.sh NAME ..         these: redis_cycles, replicas, cluster, redlock, hot_key,
#                                    several_keys, shares, postgres, mysql, sessions, memory, http,
#                                    layer, growth
#   scripts/bench.sh --rounds N ..   other than five rounds
#   scripts/bench.sh --long ..       also a million keys on Redis, in `growth`
#   scripts/bench.sh --quick ..      one short round, without pictures: the programs work
#
# Each question has a table, and a picture in docs/benchmarks/.
# With valgrind, `memory` and `layer` also count instructions, in a second build.
# The last lines are `goal NAME VALUE TARGET ok`, or `short` or `skipped` at their end. The machine
# should have nothing else to do. benches/comparison/README.md explains the questions.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --help ]; then
    sed -n '2,16s/^# \{0,1\}//p' scripts/bench.sh
    exit
fi
arguments=(--charts "$PWD/docs/benchmarks" "$@")

target=${CARGO_TARGET_DIR:-$PWD/target}/comparison
# From its own folder: another workspace and another lock file.
echo 'building, which takes minutes the first time' >&2
(cd benches/comparison && cargo build --quiet --release --target-dir "$target")

# With the clock of libc, which valgrind knows.
named=$(printf '%s\n' "$@" | grep -E '^[a-z_]+$' || true)
if command -v valgrind >/dev/null && [[ -z $named || $named =~ memory|layer ]]; then
    (cd benches/comparison && RUSTFLAGS=--cfg=rustix_use_libc cargo build --quiet --release --target-dir "$target/counted" --bin comparison)
    arguments+=(--counted "$target/counted/release/comparison")
fi

# Redisson is a Java library. Without a JDK and Maven, its questions say that it is skipped.
redisson=$target/redisson
if [[ -z $named || $named =~ cluster|redlock|hot_key|several_keys|shares ]] && [ benches/comparison/redisson/Contenders.java -nt "$redisson/classpath" ] &&
    command -v javac >/dev/null && command -v mvn >/dev/null; then
    rm -rf "$redisson"
    mkdir -p "$redisson"
    mvn --quiet --batch-mode -Dstyle.color=never -f benches/comparison/redisson/pom.xml -Dfolder="$redisson" \
        compile dependency:build-classpath -Dmdep.outputFile="$redisson/classpath" || rm -f "$redisson/classpath"
fi
# Curator, with the server of ZooKeeper, in the same way.
curator=$target/curator
if [[ -z $named || $named =~ sessions ]] && [ benches/comparison/curator/Cycles.java -nt "$curator/lib" ] &&
    command -v javac >/dev/null && command -v mvn >/dev/null; then
    rm -rf "$curator"
    mkdir -p "$curator"
    mvn --quiet --batch-mode -Dstyle.color=never -f benches/comparison/curator/pom.xml -Dfolder="$curator" \
        compile dependency:copy-dependencies -DoutputDirectory="$curator/lib" || rm -rf "$curator/lib"
fi
if [ -e "$curator/lib" ]; then
    export ZOOKEEPER_JARS=$curator/lib
    arguments+=(--curator "$curator/classes:$curator/lib/*")
fi

if [ -e "$redisson/classpath" ]; then
    arguments+=(--redisson "$redisson/classes:$(cat "$redisson/classpath")")
fi
"$target/release/comparison" "${arguments[@]}"
