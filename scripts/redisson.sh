#!/usr/bin/env bash
# Runs Redisson and processes of this crate on one lock, with an old and a new version of Redisson.
# Needs a JDK and Maven, which downloads Redisson.
#
#   scripts/redisson.sh [seconds]     a minute by default
set -euo pipefail
cd "$(dirname "$0")/.."

for version in 3.16.8 4.7.0; do
    folder=$PWD/target/redisson/$version
    if [ ! -e "$folder/classpath" ]; then
        mkdir -p "$folder"
        mvn --quiet --batch-mode -Dstyle.color=never -f tests/storm/redisson/pom.xml -Dfolder="$folder" -Dredisson=$version \
            compile dependency:build-classpath -Dmdep.outputFile="$folder/classpath"
    fi
    echo "Redisson $version"
    REDISSON_CLASSPATH="$folder/classes:$(cat "$folder/classpath")" SECONDS_OF_REDISSON="${1:-60}" \
        cargo test --quiet --release -p tower-lock-storm --test redisson -- --nocapture
done
