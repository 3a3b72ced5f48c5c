"""Runs `fl-dpgan site serve` as another user: loads the library as the user who may read it, then steps down."""

import os
import sys
from importlib import import_module
from pathlib import Path


def step_down(user: int, groups: list[int]) -> None:
    os.setgroups(groups)
    os.setresgid(groups[0], groups[0], groups[0])
    os.setresuid(user, user, user)


def main(config: str, user: str, group: str) -> None:

    from fl_dpgan.commands.serve import serve

    for late in ("fl_dpgan.federation.deployment", "torch._dynamo"):  # the last by Adam, when it is made
        import_module(late)
    step_down(int(user), [int(group)])
    serve(Path(config))


if __name__ == "__main__":
    main(*sys.argv[1:])
