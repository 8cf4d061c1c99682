#!/usr/bin/env bash
# Runs all tests, and installs their requirements.
#
#   scripts/test.sh           everything that a change must pass
#   scripts/test.sh --busy    the same beside two busy loops, to find tests that depend on timing
#   scripts/test.sh --long    and slower checks: licences, bans, sources of all dependencies, their
#                             lowest versions, types of other crates in the public API, each pair of
#                             features, repeated storms, 80 000 simulations, benchmarks
set -euo pipefail
cd "$(dirname "$0")/.."

busy= long=
for argument in "$@"; do
    case $argument in
        --busy) busy=1 ;;
        --long) long=1 ;;
        *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done

skipped=()
started=$SECONDS
step() { printf '\n\033[1m[%3d s] %s\033[0m\n' $((SECONDS - started)) "$*"; }
run() { step "$*"; "$@"; }

# --- requirements ---

step 'tools'
command -v cargo >/dev/null || { echo 'no cargo: install a Rust toolchain, https://rustup.rs' >&2; exit 1; }
# For linking, and to compile SQLite for the examples.
if ! command -v cc >/dev/null; then
    if [ "$(id -u)" != 0 ]; then
        echo 'no C compiler:  sudo apt-get install build-essential' >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -yqq build-essential
fi
# Servers that tests start for themselves. Without them those tests are skipped with a note.
packages=()
command -v "${REDIS_SERVER:-redis-server}" >/dev/null || packages+=(redis-server)
command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || packages+=(mariadb-server)
command -v openssl >/dev/null || packages+=(openssl)
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        # The packages must not start their services: an exit code of 101 forbids it.
        [ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; policy=1; }
        DEBIAN_FRONTEND=noninteractive apt-get install -yqq "${packages[@]}" >/dev/null
        if [ "${policy:-}" ]; then rm /usr/sbin/policy-rc.d; fi
    else
        skipped+=("tests on real servers:  sudo apt-get install ${packages[*]}")
    fi
fi
for component in rustfmt clippy; do
    if ! cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1; then
        rustup component add "$component" >/dev/null 2>&1 || skipped+=("$component: not installed, and rustup cannot add it")
    fi
done
rustc --version

if [ "$busy" ]; then
    step 'two busy loops'
    for _ in 1 2; do (while :; do :; done) & loops+=" $!"; done
    # shellcheck disable=SC2086  # a list of numbers
    trap 'kill $loops 2>/dev/null || true' EXIT
fi

# --- tests ---

have() { cargo "$1" --version >/dev/null 2>&1; }

if have fmt; then run cargo fmt --all --check; fi
if have clippy; then
    run cargo clippy --workspace --all-targets --all-features -- -D warnings
fi

# No feature, each feature alone, and some pairs.
for features in '' axum memory metrics redis redis-tls signal test-util __internals tracing uuid axum,memory memory,tracing axum,metrics redis,tracing \
    redis,test-util redis,__internals; do
    step "features: ${features:-none}"
    RUSTFLAGS="${RUSTFLAGS:-} -D warnings" cargo check --quiet -p tower-lock --lib --no-default-features --features "$features" \
        --target-dir target/features
done
step 'unit tests without any feature, then with memory alone'
cargo test --quiet -p tower-lock --lib --no-default-features
cargo test --quiet -p tower-lock --lib --no-default-features --features memory
cargo test --quiet -p tower-lock --lib --no-default-features --features redis

step 'docs without warnings'
RUSTDOCFLAGS='-D warnings' cargo doc --quiet --no-deps --all-features -p tower-lock

run cargo test --workspace --all-features --no-run

# Thousands of thread interleavings at the mutexes, in parallel with the suite, which mostly waits
# for servers.
step 'the lock table under other schedules, in the background'
RUSTFLAGS='--cfg tower_lock_shuttle' cargo test --quiet -p tower-lock --lib --target-dir target/schedules shuttle_tests \
    >target/schedules.log 2>&1 &
schedules=$!

# All tests: unit, integration, compile-fail, the examples, the docs, storms and the simulator. More
# threads than cores: most of them sleep.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-4}"
run cargo test --workspace --all-features

step 'the lock table under other schedules'
wait "$schedules" || { cat target/schedules.log; exit 1; }

# The first command of the README, with the default features.
run cargo run --quiet --example reward_claim -- --demo
run cargo run --quiet --example per_route
run cargo run --quiet --example per_session
run cargo run --quiet --example service_stack
run cargo run --quiet --example plain_tower --no-default-features --features memory

step 'package'
cargo package --quiet --allow-dirty -p tower-lock

if [ "$long" ]; then
    step 'licences, bans, sources'
    have deny || cargo install --quiet --locked cargo-deny
    cargo deny --log-level error check bans licenses sources
    step 'types of other crates in the public API'
    # The tool reads the JSON of rustdoc, whose format is that of one release of Rust.
    if rustc --version | grep -q '^rustc 1\.95\.'; then
        command -v cargo-check-external-types >/dev/null \
            || cargo install --quiet --locked cargo-check-external-types --version 0.5.0
        RUSTDOC=$PWD/scripts/rustdoc.sh cargo check-external-types --all-features
    else
        skipped+=('types of other crates in the public API: cargo-check-external-types 0.5.0 needs Rust 1.95')
    fi
    step 'each pair of features'
    have hack || cargo install --quiet --locked cargo-hack
    RUSTFLAGS="${RUSTFLAGS:-} -D warnings" cargo hack --quiet check --quiet -p tower-lock --lib --feature-powerset --depth 2 \
        --target-dir target/features
    if cargo +nightly --version >/dev/null 2>&1; then
        # Other lock files may have any version that the manifest allows.
        step 'the lowest versions of what the library depends on'
        rm -rf target/minimal
        mkdir -p target/minimal
        cp -r src docs README.md target/minimal
        # Without the development dependencies, which would raise the versions.
        awk '/^\[/ { cut = /^\[(\[|dev-dependencies|workspace\]|profile|target)/ } !cut' Cargo.toml >target/minimal/Cargo.toml
        cargo +nightly update --quiet -Z direct-minimal-versions --manifest-path target/minimal/Cargo.toml
        cargo check --quiet --all-features --locked --manifest-path target/minimal/Cargo.toml --target-dir target/lowest
    else
        skipped+=('the lowest versions of what the library depends on: no nightly toolchain')
    fi
    storm() {
        # The output of a failure has the seed: `SEED=`.
        cargo test --quiet -p tower-lock-storm --test storm "$@" >target/storm.log 2>&1 || { cat target/storm.log; exit 1; }
    }
    step 'the storm in one process, a hundred times'
    for n in $(seq 100); do
        printf '\r%s of 100' "$n"
        storm storm_in_one_process
    done
    echo
    step 'all storms, ten times'
    for _ in $(seq 10); do storm; done
    step 'simulations'
    for option in '' '--option force' '--option flush' '--option ctr' '--option back' '--option step' '--option java' '--option copies'; do
        # shellcheck disable=SC2086  # two words, or none
        cargo run --quiet -p tower-lock-simulator -- 1000000 1010000 $option
    done
    step 'benchmarks'
    cargo bench --quiet -p tower-lock-benches --bench service_call --bench locks --bench handoff
else
    skipped+=('licences, bans and sources of dependencies, their lowest versions, types of other crates in the public API, pairs of features, repeated storms, 80 000 simulations, benchmarks: scripts/test.sh --long')
fi

step 'done'
for what in "${skipped[@]}"; do echo "skipped  $what"; done
