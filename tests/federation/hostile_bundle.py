"""What a hostile server's code would try, as Flower's user at a site: it prints as JSON what each attempt came to.

Standard library only, and no line of the project: a bundle brings its own code, and the guard alone stands against it.
"""

import ctypes
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
from collections import Counter
from pathlib import Path

ATTEMPTS = 1000


def main() -> None:
    task = json.loads(sys.stdin.read())
    os.setgroups([task["group"]])
    os.setresgid(task["group"], task["group"], task["group"])
    os.setresuid(task["user"], task["user"], task["user"])
    found = {
        "files": {path: attempt(read, path) for path in task["files"]},
        "folders": {path: attempt(os.listdir, path) for path in task["folders"]},
        "written": {path: attempt(write, path) for path in [*task["files"], *task["folders"]]},
        "memory": attempt(memory, task["guard"]),
        "environment": attempt(read, f"/proc/{task['guard']}/environ"),
        "opened": attempt(os.listdir, f"/proc/{task['guard']}/fd"),
        "traced": attempt(trace, task["guard"]),
        "killed": attempt(os.kill, task["guard"], signal.SIGKILL),
        "socket removed": attempt(os.unlink, task["socket"]),
        "ledger replaced": attempt(os.rename, __file__, task["files"][0]),
        "rubbish": rubbish(task["socket"]),
    }
    found["answers"] = at_once(task["socket"], task["requests"], bytes.fromhex(task["tensors"]))
    print(json.dumps(found))


def attempt(what, *arguments) -> str:
    try:
        return f"succeeded: {what(*arguments)!r}"[:200]
    except OSError as error:
        return type(error).__name__


def read(path: str) -> bytes:
    return Path(path).read_bytes()[:20]


def write(path: str) -> int:
    flags = os.O_WRONLY | (os.O_CREAT if os.path.isdir(path) else 0)
    return os.open(os.path.join(path, "planted") if os.path.isdir(path) else path, flags)


def memory(pid: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb") as file:
        return file.read(1)


def trace(pid: int) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    result = library.ptrace(16, pid, 0, 0)  # PTRACE_ATTACH
    if result == -1:
        raise OSError(ctypes.get_errno(), "ptrace")
    return result


def rubbish(path: str) -> dict[str, int]:
    """Random bytes, lengths that lie, half messages, headers of a hundred thousand brackets."""
    source, outcomes = random.Random(0), Counter()
    for number in range(200):
        noise = source.randbytes(source.choice([0, 1, 11, 12, 13, 200, 70_000]))
        raw = [
            noise,
            struct.pack(">IQ", 2**32 - 1, 2**64 - 1) + noise,
            struct.pack(">IQ", len(noise), 2**63) + noise,
            struct.pack(">IQ", 100_000, 0) + b"[" * 100_000,
            struct.pack(">IQ", 2, 0) + b"{}",
        ][number % 5]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            try:
                connection.connect(path)
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                header, _ = receive(connection)
                outcomes[header["state"]] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
    return outcomes


def at_once(path: str, requests: list[str], tensors: bytes) -> list[str]:
    """The answers to a thousand requests at the same time."""
    answers: list[str] = []

    def ask(number: int) -> None:
        header = json.dumps({"kind": "train", "header": requests[number % len(requests)]}).encode()
        while True:
            with socket.socket(socket.AF_UNIX) as connection:
                try:
                    connection.connect(path)
                    connection.sendall(struct.pack(">IQ", len(header), len(tensors)) + header)
                    connection.sendall(tensors)
                except OSError:
                    pass
                try:
                    while (reply := receive(connection)[0])["state"] == "wait":
                        pass
                except OSError as error:
                    answers.append(type(error).__name__)
                    return
            if reply["state"] != "full" or number >= len(requests):  # the first of each comes again until it is served
                answers.append(reply.get("header", reply["state"]))
                return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(ATTEMPTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def receive(connection: socket.socket) -> tuple[dict[str, str], bytes]:
    lengths = struct.unpack(">IQ", exactly(connection, 12))
    header, body = (exactly(connection, length) for length in lengths)
    return json.loads(header), body


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return data


if __name__ == "__main__":
    main()
