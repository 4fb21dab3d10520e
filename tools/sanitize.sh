#!/usr/bin/env bash
# Multi-process tests with torchext._C under a sanitizer, in a copy of the tree: sanitize.sh KIND PYTHON PYTEST-ARGUMENTS...
#   KIND: thread, or address (and undefined behaviour). Fails when a test fails or any process of a test left a report.
# Each source is compiled on its own here, which shows that it includes what it needs.
# torch and Python themselves are not instrumented: a race between two of our accesses is found, one inside torch is not.
set -euo pipefail
kind=$1 python=$2
shift 2
copy=$PWD/build-sanitize-$kind
bash tools/copy_tree.sh "$copy"
cd "$copy"
TORCHEXT_SANITIZE=$kind TORCHEXT_CUDA=0 TORCHEXT_BATCH=1 "$python" setup.py --quiet build_ext --inplace >build.log 2>&1 ||
  { tail -n 30 build.log; exit 1; }

choice=()
case $kind in
  # It knows no threads after a fork.
  thread) library=libtsan.so choice=(-k "not forked") ;;
  address) library=libasan.so ;;
  *) echo "sanitize.sh: thread or address, not $kind" >&2; exit 2 ;;
esac
reports=$copy/reports
rm -rf "$reports"
mkdir "$reports"
# libstdc++ as well: the sanitizer must find __cxa_throw before torch is loaded.
preload="$(g++ -print-file-name=$library) $(g++ -print-file-name=libstdc++.so.6)"
# Threads that a process leaves behind are no fault: tests of faults end without destroying their groups.
status=0
env LD_PRELOAD="$preload" PYTHONPATH="$copy" \
  TSAN_OPTIONS="ignore_noninstrumented_modules=1 report_thread_leaks=0 exitcode=66 suppressions=$copy/tools/tsan.supp log_path=$reports/tsan second_deadlock_stack=1" \
  ASAN_OPTIONS="detect_leaks=0 log_path=$reports/asan" UBSAN_OPTIONS="print_stacktrace=1 log_path=$reports/ubsan" \
  "$python" -m pytest -q -p no:cacheprovider ${choice[@]+"${choice[@]}"} "$@" </dev/null || status=$?
found=$(find "$reports" -type f | wc -l)
if ((found)); then
  echo "$found reports of the $kind sanitizer in $reports; the first:" >&2
  head -n 60 "$(find "$reports" -type f | sort | head -n 1)" >&2
  status=1
fi
exit "$status"
