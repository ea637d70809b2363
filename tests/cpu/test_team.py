"""The thread team of the C++ kernels where threads cannot be had: the call fails, and the next one waits for nobody."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from autosel import resources
from autosel.native.compile import find_compiler

SHORT_OF_THREADS = """
#include <cstdio>
#include <exception>
#include <sys/resource.h>
#include "team.h"
using autosel::team_v1::team;
std::atomic<int> ran{0};
int main() {
  rlimit whole;
  getrlimit(RLIMIT_AS, &whole);
  rlimit little{64u << 20, whole.rlim_max};  // a stack takes 8 MiB of it
  setrlimit(RLIMIT_AS, &little);
  auto job = [](void*, int, int) { ++ran; };
  try {
    team().run(40, job, nullptr);
    puts("ran");
  } catch (const std::exception&) {
    puts("failed");
  }
  setrlimit(RLIMIT_AS, &whole);
  ran = 0;
  team().run(40, job, nullptr);
  printf("then %d\\n", ran.load());
  fflush(stdout);
  _exit(0);
}
"""


def test_a_call_for_which_threads_are_lacking_fails_and_the_next_one_is_whole(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler found")
    (tmp_path / "t.cpp").write_text(SHORT_OF_THREADS)
    built = [compiler.path, "-O1", "-std=c++17", "-pthread", f"-I{resources.kernels() / 'cpu'}"]
    subprocess.run([*built, str(tmp_path / "t.cpp"), "-o", str(tmp_path / "t")], check=True, capture_output=True)
    limited = f"ulimit -s 8192; exec {tmp_path / 't'}"
    done = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["failed", "then", "40"]
