"""A seeded generator of hostile requests: genuine ones of the strategy, with one to three things in them changed."""

import copy
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from safetensors.torch import save
from torch import Tensor

#: What the site's policy allows at most; plans beyond are refused, plans up to it are trained.
LEAST_NOISE, MOST_STEPS, MOST_BATCH, MOST_NORM = 0.5, 4, 8, 2.0
#: What it allows of a moment release.
MOST_MOMENTS = 10_500
#: The smallest clipping norm that the schema allows.
LEAST_NORM = 1e-6

_FLOATS = [0, -0.0, -1, 0.1, 0.4999999, 5e-324, 1e-310, -5e-324, 1e30, 1e308, 3.4e38, float("nan"), float("inf")]
_INTEGERS = [-(10**9), 2**31, 2**53 + 1, 2**63, 2**64, 10**9, 10**30, 10**400]
_OTHERS = ["", "1", "NaN", "0x10", None, True, [], [1], {}, {"rule": "fixed"}, "\x00", "a" * 5000, "../../x", "é\n"]
_STRANGERS = [
    "seed",
    "noise",
    "sigma",
    "budget",
    "clipping_norm",
    "least_noise_multiplier",
    "__class__",
    "py/object",
    "",
]
_RULES: list[dict[str, Any]] = [
    {"rule": "fixed", "c": 1.0},
    {"rule": "automatic", "c": 1.0},
    {"rule": "epsilon_adaptive", "c_min": 0.5, "c_max": 1.5, "gamma": 1.0},
    {"rule": "quantile", "c_first": 1.0, "c_min": 1e-3, "c_max": 2.0, "quantile": 0.5, "rate": 0.2, "count_noise": 5.0},
]


@dataclass
class Hostile:
    """A request in the making. `method` is the site's; `text` and `body`, once set, stand for `header` and `state`."""

    header: dict[str, Any]
    state: dict[str, Tensor]
    method: str
    text: str = ""
    body: bytes | None = None
    content: RecordDict | None = None
    error: bool = False
    anchors: tuple[str, ...] = ()
    done: list[str] = field(default_factory=list)

    @property
    def plan(self) -> dict[str, Any]:
        """The header's plan; nothing of it, where an earlier change has spoilt it."""
        plan = self.header.get("plan")
        return plan if isinstance(plan, dict) else {}

    def message(self) -> Message:
        kind = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE, "hello": MessageType.QUERY}[self.method]
        content = self.content
        if content is None:
            text = self.text or json.dumps(self.header)
            content = RecordDict({"fl_dpgan": ConfigRecord({"headers": [text], "tensors": [self.bytes_of_tensors()]})})
        message = Message(content, dst_node_id=1, message_type=kind)
        message.metadata.__dict__["_message_id"] = "sent"
        if self.error:
            message = Message(Error(code=1, reason="x"), reply_to=message)
            message.metadata.__dict__["_message_id"] = "sent"
        return message

    def bytes_of_tensors(self) -> bytes:
        return save(self.state) if self.body is None else self.body


Mutator = Callable[[random.Random, Hostile], None]


def generate(
    source: random.Random,
    genuine: Hostile,
    *,
    share: float = 0.09,
    mutators: tuple[list[Mutator], list[Mutator]] | None = None,
) -> Hostile:
    """A copy of the genuine request with one to three changes; in a share of them, only such as the schema allows.

    Args:
        mutators: those that the schema and the policy allow, and the others; left out, those of updates and counts.
    """
    permitted, forbidden = mutators or (ALLOWED, FORBIDDEN)
    hostile = copy.deepcopy(genuine)
    allowed = source.random() < share
    for _ in range(source.choice([1, 1, 2, 3])):
        mutate = source.choice(permitted if allowed or source.random() < 0.3 else forbidden)
        mutate(source, hostile)
        hostile.done.append(mutate.__name__.strip("_"))
    return hostile


# --- what the schema and the policy allow, and a site so has to bear


def _strange_plan(source: random.Random, hostile: Hostile) -> None:
    for key in source.sample(sorted(_PLAN_VALUES), source.choice([1, 2, 4])):
        hostile.plan[key] = source.choice(_PLAN_VALUES[key])


_PLAN_VALUES: dict[str, list[Any]] = {
    "batch_size": [1, 2, 3, MOST_BATCH],
    "d_steps": [1, 1, 2, MOST_STEPS],
    "rounds": [1, 7, 10**6, 10**9 // MOST_STEPS // 100],
    "noise_multiplier": [LEAST_NOISE, LEAST_NOISE + 1e-16, 0.7, 1, 1.5, 30.0, 1e3, 1e6],
    "eps_max": [1000, 1000.0, 100, 900.5, 1e-3, 5e-324],
    "evaluation_noise": [None, LEAST_NOISE, 3, 1e6],
    "evaluation_every": [1, 10**6],
}


def _strange_clipping(source: random.Random, hostile: Hostile) -> None:
    c = source.choice([MOST_NORM, 1, 1.9999, 0.1, 1e-3, math.nextafter(LEAST_NORM, 1), LEAST_NORM])
    low = source.choice([c, LEAST_NORM, max(c / 2, LEAST_NORM)])
    hostile.plan["clipping"] = _rule(source, hostile, low, c)


def _rule(source: random.Random, hostile: Hostile, low: float, c: float) -> dict[str, Any]:
    """One of the rules with norms from `low` to `c`, and everything else within its bounds."""
    sigma = hostile.plan.get("noise_multiplier")
    least = sigma / 2 if isinstance(sigma, float) and LEAST_NOISE <= sigma < 1e6 else 1.0
    return source.choice(
        [
            {"rule": "fixed", "c": c},
            {"rule": "automatic", "c": c},
            {"rule": "epsilon_adaptive", "c_min": low, "c_max": c, "gamma": source.choice([5e-324, 1e-300, 1, 100])},
            {
                "rule": "quantile",
                "c_first": source.choice([low, c]),
                "c_min": low,
                "c_max": source.choice([c, MOST_NORM]),
                "quantile": source.choice([5e-324, 1e-9, 0.5, 1 - 1e-16]),
                "rate": source.choice([5e-324, 0.2, 10]),
                "count_noise": source.choice([math.nextafter(least, 9e9), least * (1 + 1e-9), 3.0, 1e6]),
            },
        ]
    )


def _strange_names(source: random.Random, hostile: Hostile) -> None:
    hostile.header["run"] = source.choice(["a", ".", "-", "..", "0" * 64, "main", "test"])
    hostile.header["round"] = source.choice([1, 2, 10**7, source.randint(1, 10**7)])


def _known_anchor(source: random.Random, hostile: Hostile) -> None:
    hostile.header["anchor"] = source.choice([*hostile.anchors, ""])


def _filled(source: random.Random, hostile: Hostile) -> None:
    """Some tensors, or all, hold one finite value."""
    value = source.choice([1e30, -1e30, 3.4e38, -3.4e38, 1e-45, 1e-39, 0.0, 1.0, 1e10, 1e-20])
    names = sorted(hostile.state)
    for name in source.sample(names, min(source.choice([1, 2, len(names)]), len(names))):
        if _real(hostile.state[name]):
            hostile.state[name] = torch.full_like(hostile.state[name], value)
        elif name.endswith("num_batches_tracked"):
            hostile.state[name] = torch.tensor(source.choice([2**62, -1, 0]))


def _scaled(source: random.Random, hostile: Hostile) -> None:
    factor = source.choice([1e30, -1e20, 1e10, 1e-30, 1e-44, -1.0, 0.0])
    part = source.choice(["discriminator", "generator", "classifier", "weight", "bias"])
    for name, tensor in hostile.state.items():
        if part in name and _real(tensor):
            hostile.state[name] = tensor * factor


def _one_weight(source: random.Random, hostile: Hostile) -> None:
    names = [name for name, tensor in sorted(hostile.state.items()) if _real(tensor)]
    if not names:  # earlier changes have spoilt them all
        return
    name = source.choice(names)
    tensor = hostile.state[name].clone()
    tensor.view(-1)[source.randrange(tensor.numel())] = source.choice([1e30, -3.4e38, 3.4e38, 1e-45, 1e19])
    hostile.state[name] = tensor


def _negative_variance(source: random.Random, hostile: Hostile) -> None:
    for name in [name for name, tensor in hostile.state.items() if name.endswith("running_var") and _real(tensor)]:
        hostile.state[name] = torch.full_like(hostile.state[name], source.choice([-1.0, -1e-5, -3e38, 0.0]))


def _bright_overflow(source: random.Random, hostile: Hostile) -> None:
    """The first layer overflows where 16 pixels of a patch are all near 1, as in one image alone."""
    first, second = "discriminator.features.0.weight", "discriminator.features.2.weight"
    if first in hostile.state and _real(hostile.state[first]):
        hostile.state[first] = torch.full_like(hostile.state[first], source.choice([2.2e37, 2.4e37, 3.0e37]))
        if second in hostile.state and source.random() < 0.8:
            hostile.state[second] = hostile.state[second] * 1e-37


def _sure_of_reals(source: random.Random, hostile: Hostile) -> None:
    """A bias with which every real looks so real that its gradient is subnormal."""
    name = "discriminator.head.bias"
    if name in hostile.state and _real(hostile.state[name]):
        hostile.state[name] = torch.full_like(hostile.state[name], source.choice([50.0, 88.0, 100.0, 103.9, -100.0]))


def _strange_features(source: random.Random, hostile: Hostile) -> None:
    """A moment release of other features; at tiny scales an angle is so large that float32 knows nothing of it."""
    parts = [source.choice([_fourier, _wavelets])(source) for _ in range(source.choice([1, 1, 2, 4]))]
    for part in parts:
        part["weight"] = source.choice([1.0, 1e-3, 3, 1e3])
    share = source.choice([0.1, 5e-324, 1e-9, 0.5, 1 - 1e-16])
    hostile.plan["moments"] = {"parts": parts, "count_share": share}
    if hostile.plan.get("moment_noise") is None:
        hostile.plan["moment_noise"] = LEAST_NOISE


def _fourier(source: random.Random) -> dict[str, Any]:
    scales = [60.0, 300, 1, 60.0, 300, 1, 1e9, 1e-3, 1e-9, 1e-20, 1e-44, 5e-324]
    return {
        "kind": "fourier",
        "count": source.choice([2, 2, 4, 20, 200, 2000]),
        "scales": source.choices(scales, k=source.choice([1, 1, 2, 16])),
        "seed": source.choice([0, 1, 2**31 - 1]),
    }


def _wavelets(source: random.Random) -> dict[str, Any]:
    return _fourier(source) | {"kind": "wavelets", "side": source.choice([1, 2, 7, 14])}


def _strange_moment_noise(source: random.Random, hostile: Hostile) -> None:
    """From the policy's least to the schema's largest; where the plan has no moments, that is half of a release."""
    values = [LEAST_NOISE, math.nextafter(LEAST_NOISE, 1), 0.7, 1, 1.5, 30.0, 1e3, 1e6]
    hostile.plan["moment_noise"] = source.choice(values)


def _strange_images(source: random.Random, hostile: Hostile) -> None:
    """As many images as the plan says, with pixels on the border of [-1, 1], or with one label alone."""
    if "images" not in hostile.state:
        return
    size = source.randint(1, MOST_BATCH)
    images = hostile.state["images"][:1].repeat(size, *[1] * (hostile.state["images"].dim() - 1))
    value = source.choice([None, 1.0, -1.0, 0.0, -0.0, 1e-45, math.nextafter(1, 0)])
    if value is not None and images.is_floating_point():
        images = torch.full_like(images, value)
    hostile.state |= {"images": images, "labels": torch.arange(size) % 2 * source.choice([0, 1])}
    hostile.plan["batch_size"] = size


# --- what a site refuses, or happens to survive


def _any_field(source: random.Random, hostile: Hostile) -> None:
    holder, key = source.choice(_fields(hostile.header))
    holder[key] = source.choice([source.choice(_FLOATS), source.choice(_INTEGERS), source.choice(_OTHERS)])


def _missing_field(source: random.Random, hostile: Hostile) -> None:
    holder, key = source.choice(_fields(hostile.header))
    del holder[key]


def _unknown_field(source: random.Random, hostile: Hostile) -> None:
    holder, _ = source.choice(_fields(hostile.header))
    holder[source.choice(_STRANGERS)] = source.choice([0, 1, "x", None, {}])


def _doubled_field(source: random.Random, hostile: Hostile) -> None:
    """The same key twice, so that whoever reads the first and whoever reads the last see two plans."""
    holder, key = source.choice(_fields(hostile.plan or hostile.header))
    first, last = (json.dumps(value) for value in source.sample([0.01, 1, 10**9, holder[key]], 2))
    hostile.text = json.dumps(hostile.header).replace(
        f'"{key}": {json.dumps(holder[key])}', f'"{key}": {first}, "{key}": {last}', 1
    )


def _other_rule(source: random.Random, hostile: Hostile) -> None:
    """A clipping rule with one value of the wrong size or kind, or with another rule's fields."""
    rule = copy.deepcopy(source.choice(_RULES))
    key = source.choice(sorted(rule))
    rule[key] = source.choice([*_FLOATS, *_OTHERS, 2.0000001, 99.0])
    hostile.plan["clipping"] = rule


def _tiny_clipping(source: random.Random, hostile: Hostile) -> None:
    """Norms at which clipped gradients and noise would be subnormal in single precision, or nearly so."""
    low = source.choice([math.nextafter(LEAST_NORM, 0), 1e-7, 1e-30, 1e-40, 1e-45, 5e-324])
    c = source.choice([low, low, low * 2, LEAST_NORM, 0.1, MOST_NORM])
    rule = _rule(source, hostile, low, c)
    hostile.plan["clipping"] = rule | ({"c": low} if "c" in rule else {"c_min": low})


def _beyond_policy(source: random.Random, hostile: Hostile) -> None:
    changes = [
        {"noise_multiplier": source.choice([0.1, 0.4999999999999999])},
        {"evaluation_noise": 0.49},
        {"d_steps": source.choice([MOST_STEPS + 1, 100_000]), "rounds": 1},
        {"d_steps": 100, "rounds": 10**7},
        {"batch_size": MOST_BATCH + 1},
        {"batch_size": 11},
        {"clipping": {"rule": source.choice(["fixed", "automatic"]), "c": MOST_NORM * (1 + 1e-15)}},
        {"clipping": {"rule": "epsilon_adaptive", "c_min": LEAST_NORM, "c_max": 1e6, "gamma": 1}},
        {"clipping": {**_RULES[3], "c_max": 2.5}},
        {"delta": source.choice([1e-6, 1e-5 * (1 + 1e-15), 1e-3, 0.49])},
        {"declared_size": source.choice([11, 13, 10**9])},
        {"unit": "patient"},
        {"order": source.choice([1.5, 63, 3, 64, 512, 1024])},
        {"eps_max": 1000.0001},
    ]
    hostile.plan.update(source.choice(changes))


def _other_address(source: random.Random, hostile: Hostile) -> None:
    key, values = source.choice(
        [
            ("site", ["site-1", "", "site-0 ", "SITE-0", "\u202esite-0", "%s%n{0}", "<b>"]),
            ("mechanism", ["evaluation_count", "discriminator_update", "raw_images", "hello"]),
            ("anchor", ["0" * 64, "f" * 64, "F" * 64, "0" * 63, "g" * 64]),
            ("run", ["a b", "", "a" * 65, "a\n", "../x", "run\u0000"]),
            ("round", [0, -1, 10**7 + 1, 1.0, 1.5, "1"]),
        ]
    )
    hostile.header[key] = source.choice(values)


def _other_method(source: random.Random, hostile: Hostile) -> None:
    hostile.method = source.choice(["train", "evaluate", "hello"])


def _other_text(source: random.Random, hostile: Hostile) -> None:
    text = json.dumps(hostile.header)
    place = source.randrange(len(text))
    hostile.text = source.choice(
        [
            text[:place] or "{",
            text[:place] + source.choice('{}[],:"\\0\x00\ud83d\ufeff') + text[place + 1 :],
            text + source.choice([" ", "\n", "x", text, "\x00"]),
            "\ufeff" + text,
            text.replace("1", "1" * 5000, 1),
            text.replace(": 1", ": 1e5000", 1),
            text.replace('"', "'"),
            "[" * 100_000,
            '{"plan":' * 20_000,
            "null",
            "[]",
            '"x"',
            "NaN",
            " ",
            json.dumps([hostile.header]),
            json.dumps(text),
        ]
    )


def _other_content(source: random.Random, hostile: Hostile) -> None:
    text, body = json.dumps(hostile.header), hostile.bytes_of_tensors()
    record = {"headers": [text], "tensors": [body]}
    hostile.content = source.choice(
        [
            RecordDict(),
            RecordDict({"other": ConfigRecord(record)}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text.encode()], "tensors": [body]})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": text, "tensors": body})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text], "tensors": ["x"]})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [1.0, 2.0], "tensors": 7})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text]})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text], "tensors": []})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [], "tensors": [body]})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text, text], "tensors": [body]})}),
            RecordDict({"fl_dpgan": ConfigRecord({"headers": [text], "tensors": [body, body]})}),
            RecordDict({"fl_dpgan": ConfigRecord({**record, "seed": 1})}),
            RecordDict({"fl_dpgan": ConfigRecord(record), "more": ConfigRecord({"seed": 1})}),
        ]
    )


def _error_message(source: random.Random, hostile: Hostile) -> None:
    hostile.error = True


def _not_finite(source: random.Random, hostile: Hostile) -> None:
    names = [name for name, tensor in sorted(hostile.state.items()) if _real(tensor)]
    if not names:  # earlier changes have spoilt them all
        return
    name = source.choice(names)
    tensor = hostile.state[name].clone()
    tensor.view(-1)[source.randrange(tensor.numel())] = source.choice([float("nan"), float("inf"), -float("inf")])
    hostile.state[name] = tensor


def _other_form(source: random.Random, hostile: Hostile) -> None:
    if not hostile.state:
        return
    name = source.choice(sorted(hostile.state))
    tensor = hostile.state[name]
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    hostile.state[name] = source.choice(
        [
            tensor.to(source.choice(kinds)),
            tensor.reshape(-1),
            tensor.unsqueeze(0),
            torch.zeros(0),
            torch.zeros(1, 10**6),
            tensor.reshape(-1)[:-1].clone(),
        ]
    )


def _other_tensors(source: random.Random, hostile: Hostile) -> None:
    if not hostile.state:
        return
    name = source.choice(sorted(hostile.state))
    choice = source.choice(["missing", "extra", "renamed", "none", "moved"])
    if choice in ("missing", "renamed"):
        tensor = hostile.state.pop(name)
        if choice == "renamed":
            hostile.state[source.choice([name + " ", name.upper(), "x" * 2000, "\u202e", name + "\x00"])] = tensor
    elif choice == "extra":
        hostile.state[source.choice(["images", "optimizer.0.exp_avg", "clipping_norm", ""])] = torch.ones(3)
    elif choice == "none":
        hostile.body = save({})
    else:
        hostile.state = {key.replace("discriminator", "generator"): tensor for key, tensor in hostile.state.items()}


def _other_bytes(source: random.Random, hostile: Hostile) -> None:
    body = save(hostile.state)
    length = int.from_bytes(body[:8], "little")
    place = source.randrange(len(body))
    head = body[8 : 8 + length]
    hostile.body = source.choice(
        [
            b"",
            body[:place],
            body + b"\x00",
            (2**63).to_bytes(8, "little") + body[8:],
            (2**64 - 1).to_bytes(8, "little") + body[8:],
            (length + source.choice([-1, 1, 8])).to_bytes(8, "little") + body[8:],
            source.randbytes(200),
            b"\x80\x04N.",
            body[:place] + bytes([body[place] ^ (1 << source.randrange(8))]) + body[place + 1 :],
            _headed(head.replace(b'"F32"', source.choice([b'"F64"', b'"F8_"', b'"F4"', b'"BOOL"', b"3"]), 1), body),
            _headed(head.replace(b'"F32"', source.choice([b'"F8_E4M3"', b'"F4"', b'"C64"', b'"U16"'])), body),
            _headed(head.replace(b'"data_offsets":[0', b'"data_offsets":[4', 1), body),
            _headed(head.replace(b'"data_offsets":[0', b'"data_offsets":[-1', 1), body),
            _headed(head.replace(b'"shape":[', b'"shape":[99999999999,', 1), body),
            _headed(head.replace(b'"shape":[', b'"shape":[0,', 1), body),
            _headed(b'{"__metadata__":{"a":"b"},' + head[1:], body),
            _headed(b"[" * 5000, body),
        ]
    )


def _headed(head: bytes, body: bytes) -> bytes:
    """Safetensors with another header."""
    old = int.from_bytes(body[:8], "little")
    return len(head).to_bytes(8, "little") + head + body[8 + old :]


def _other_features(source: random.Random, hostile: Hostile) -> None:
    """Features of which one thing is not as the schema or the policy has it; now and then it is, by accident."""
    fourier = {"kind": "fourier", "count": 4, "scales": [60.0], "seed": 0, "weight": 1.0}
    wavelets = fourier | {"kind": "wavelets", "side": 2}
    faults: list[tuple[dict[str, Any], str, list[Any]]] = [
        (fourier, "count", [0, 1, 3, -2, 10_502, 99_998, 100_000, 100_002, 10**30, 2.5, 4.0, *_OTHERS]),
        (fourier, "scales", [[], [0], [-1], [float("nan")], [float("inf")], [1e9 * (1 + 1e-15)], [1.0] * 17, *_OTHERS]),
        (fourier, "seed", [-1, 2**31, 2**64, 0.5, float("nan"), *_OTHERS]),
        (wavelets, "count", [0, 1, 3, -2, 10_502, 100_002, 10**30, 2.5, *_OTHERS]),
        (wavelets, "side", [0, 15, -1, 6.5, 10**9, float("nan"), *_OTHERS]),
        (wavelets, "weight", [0, -1, 9.99e-4, 1000.1, float("nan"), float("inf"), 5e-324, *_OTHERS]),
        (fourier, "kind", ["wavelet", "raw", *_OTHERS]),
        (fourier, "side", [7, *_OTHERS]),
        (wavelets, "pixels", [0, *_OTHERS]),
    ]
    part, key, values = source.choice(faults)
    spoiled = part | {key: source.choice(values)}
    whole = {"parts": source.choice([[spoiled], [fourier, wavelets, spoiled]]), "count_share": 0.1}
    share = source.choice([0, -0.0, 1, -1, 1 + 1e-15, float("nan"), float("inf"), *_OTHERS])
    hostile.plan["moments"] = source.choice(
        [
            *[whole] * 6,
            {"parts": [fourier], "count_share": share},
            {"parts": [fourier] * source.choice([0, 5, 1000]), "count_share": 0.1},
            {"parts": [wavelets | {"count": 10_440}, fourier | {"count": 62}], "count_share": 0.1},
            source.choice([None, *_OTHERS]),
        ]
    )


def _other_moment_noise(source: random.Random, hostile: Hostile) -> None:
    weak = [math.nextafter(LEAST_NOISE, 0), 0.4999999, 0.1, math.nextafter(0.1, 0), 1e6 * (1 + 1e-15)]
    hostile.plan["moment_noise"] = source.choice([*weak, *weak, *_FLOATS, *_OTHERS])


def _other_mechanism(source: random.Random, hostile: Hostile) -> None:
    """What is asked for and what the plan's rounds release do not go together, or a method brings what it does not."""
    asked = ["discriminator_update", "evaluation_count", "moment_release", "image_gradient"]
    if source.random() < 0.5:
        hostile.header["mechanism"] = source.choice(asked)
    else:
        hostile.plan["update"] = source.choice([*asked, "", None])


def _needless_tensors(source: random.Random, hostile: Hostile) -> None:
    """What a moment release has no use for, and a gradient no place."""
    images = {"images": torch.zeros(2, 1, 28, 28), "labels": torch.zeros(2, dtype=torch.int64)}
    bodies = [save({}), save({"x": torch.ones(1)}), save(images), b"\x00", b"{}", source.randbytes(40)]
    hostile.body = source.choice(bodies)


def _other_images(source: random.Random, hostile: Hostile) -> None:
    images, labels = hostile.state.get("images"), hostile.state.get("labels")
    if images is None or labels is None or not images.numel() or not labels.numel():
        return
    if source.random() < 0.4:
        pixels = images.clone().view(-1).float()
        value = source.choice([float("nan"), float("inf"), 2.0, -2.0, math.nextafter(1, 2), 1 + 2e-7, -3.4e38])
        pixels[source.randrange(len(pixels))] = value  # the double next to 1 is 1 in single precision, and allowed
        hostile.state["images"] = pixels.view(images.shape)
    elif source.random() < 0.5:
        label = source.choice([-1, 2, 2**40, -(2**63), 255])
        hostile.state["labels"] = torch.cat([labels.flatten()[1:].long(), torch.tensor([label])])
    else:
        hostile.state |= source.choice(
            [
                {"images": images[1:].clone()},
                {"labels": labels[1:].clone()},
                {"images": images[1:].clone(), "labels": labels[1:].clone()},
                {"images": images.repeat(2, *[1] * (images.dim() - 1)), "labels": labels.repeat(2)},
                {"images": torch.zeros(len(images), 3, 28, 28)},
                {"images": torch.zeros(len(images), 1, 32, 32)},
                {"images": images.half()},
                {"labels": labels.int()},
                {"labels": labels.float()},
                {"images": labels, "labels": images},
            ]
        )


def _without_noise(source: random.Random, hostile: Hostile) -> None:
    hostile.plan["non_private"] = source.choice([True, True, 1, "true"])


def _fields(holder: Any) -> list[tuple[Any, Any]]:
    """Every field of the header at any depth, as its holder and its key."""
    if not isinstance(holder, dict):
        return []
    return [pair for key, value in holder.items() for pair in [(holder, key), *_fields(value)]]


def _real(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.numel() > 0


ALLOWED: list[Mutator] = [
    _strange_plan,
    _strange_plan,
    _strange_clipping,
    _strange_clipping,
    _strange_names,
    _known_anchor,
    _filled,
    _scaled,
    _one_weight,
    _negative_variance,
    _bright_overflow,
    _sure_of_reals,
]
FORBIDDEN: list[Mutator] = [
    _any_field,
    _any_field,
    _any_field,
    _missing_field,
    _unknown_field,
    _doubled_field,
    _other_rule,
    _tiny_clipping,
    _beyond_policy,
    _other_address,
    _other_method,
    _other_text,
    _other_content,
    _error_message,
    _not_finite,
    _other_form,
    _other_tensors,
    _other_bytes,
]

#: Those for a campaign against moment releases and image gradients.
RELEASES: tuple[list[Mutator], list[Mutator]] = (
    [
        *[_strange_features] * 3,
        *[_strange_images] * 3,
        _strange_moment_noise,
        _strange_plan,
        _strange_clipping,
        _strange_names,
        _known_anchor,
    ],
    [
        *[_other_features] * 4,
        *[_other_images] * 4,
        *[_other_moment_noise] * 2,
        *[_other_mechanism] * 3,
        *[_needless_tensors] * 2,
        *[_without_noise] * 2,
        *sorted(set(FORBIDDEN), key=FORBIDDEN.index),
    ],
)
