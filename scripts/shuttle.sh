#!/bin/sh
# A wrapper of rustc, for RUSTC_WORKSPACE_WRAPPER: the mutexes of the crate are those of shuttle.
exec "$@" --cfg tower_lock_shuttle
