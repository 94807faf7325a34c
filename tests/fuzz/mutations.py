"""What is done to a file: to its bytes, to its JSON, to the table of contents of its tensors, or to
what stands at its name.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from random import Random

DEEP = 100_000
SPECIAL = (
    "pickle",
    "zipped pickle",
    "folder",
    "pipe",
    "device",
    "link to a file",
    "link to itself",
    "empty",
    "gone",
)
# In place of a value, as they stand in the file.
VALUES = [
    *(
        b"null",
        b"true",
        b"false",
        b"0",
        b"-1",
        b"1",
        b"2",
        b"3.5",
        b"-0.0",
        b"1e-320",
        b"1e308",
        b"1e999",
        b"-1e999",
    ),
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"9007199254740993",
        b"9223372036854775807",
        b"9223372036854775808",
    ),
    *(
        b"1152921504606846976",
        b"-9223372036854775809",
        b"9" * 30,
        b"9" * 400,
        b"-" + b"9" * 400,
        b"9" * 5000,
    ),
    *(
        b"[]",
        b"{}",
        b"[[]]",
        b'[{"a": 1}]',
        b"[" * 40 + b"]" * 40,
        b"[" * 700 + b"]" * 700,
        b"[" * DEEP + b"]" * DEEP,
    ),
    *(
        b'{"a":' * 700 + b"1" + b"}" * 700,
        b'{"dict":' * 300 + b"{}" + b"}" * 300,
        b"[" + b"0," * 5000 + b"0]",
    ),
    *(
        b'""',
        b'"a"',
        b'"inf"',
        b'"nan"',
        b'"0x10"',
        b'"finished"',
        b'"' + b"x" * 300_000 + b'"',
        b'"a\\nb\\r\\nc"',
    ),
    *(
        b'"../../x"',
        b'"/etc/passwd"',
        b'".."',
        b'"."',
        b'"a/../../b"',
        b'"\\u0000"',
        b'"x\\u0000y"',
        b'"CON"',
        b'"NUL.txt"',
    ),
    *(
        b'"C:\\\\\\\\x"',
        b'"file:///etc/passwd"',
        b'"~/x"',
        b'"%2e%2e%2f"',
        b'"' + b"y/" * 3000 + b'"',
    ),
    *(
        b'"\\u001b[2J\\u001b]0;owned\\u0007"',
        b'"\\u009b31m"',
        b'"\\u202egnp.exe"',
        b'"\\ud800"',
        b'"\\udcff\\ud83d"',
    ),
    *(
        b'"\xff\xfe"',
        b'"\xc0\x80"',
        b'"<script>alert(1)</script>"',
        b'"\\"><img src=x onerror=alert(1)>"',
        b"'single'",
        b"tru",
    ),
    *(
        b'{"tensor": {"dtype": "float32", "shape": [1152921504606846976]}}',
        b'{"int": "0x' + b"f" * 9000 + b'"}',
        b'{"float": "nan"}',
    ),
]
NAMES = [value for value in VALUES if value.startswith(b'"')]
HOLE = "@hole@"


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Flips, cuts, insertions and repetitions, wherever they fall."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(found) + 1)
        length = random.choice((1, 2, 8, 64, 1000))
        what = random.randrange(7)
        if what <= 1 and found:
            found[at % len(found)] ^= 1 << random.randrange(8)
        elif what == 2:
            del found[at:]
        elif what == 3:
            found[at:at] = random.randbytes(length)
        elif what == 4:
            del found[at : at + length]
        elif what == 5:
            found[at:at] = found[at : at + length]
        else:
            found[at : at + length] = random.choice((b"\0", b"\xff", b"9", b'"', b"{")) * length
    return bytes(found)


def mutate_json(data: bytes, random: Random) -> bytes:
    """One value, name or member of a JSON text becomes something else; the rest stays as it is."""
    tree = json.loads(data)
    places = list(_places(tree))
    holder, key = random.choice(places)
    what = random.randrange(6) if isinstance(holder, dict) else random.choice((0, 0, 1, 5))
    fragment = random.choice(VALUES)
    if holder is None:
        return fragment
    if what == 1:
        del holder[key]
    elif what == 2:
        holder[HOLE] = holder.pop(key)
        fragment = random.choice(NAMES)
    elif what == 3:  # the same name twice
        fragment = (
            json.dumps(holder[key]).encode() + b", " + json.dumps(key).encode() + b": " + fragment
        )
        holder[key] = HOLE
    elif what == 4:
        holder[HOLE] = 1
        fragment = random.choice(NAMES)
    elif (
        what == 5 and isinstance(value := holder[key], int | float) and not isinstance(value, bool)
    ):
        near = random.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value * 10**6,
                value + 0.5,
                str(value),
                [value],
                2**31 - 1,
            )
        )
        fragment = json.dumps(near).encode()
        holder[key] = HOLE
    else:
        holder[key] = HOLE
    return json.dumps(tree).encode().replace(f'"{HOLE}"'.encode(), fragment)


def _places(tree, holder=None, key=None):
    yield holder, key
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, child in inner:
        yield from _places(child, tree, name)


def mutate_tensors(data: bytes, random: Random) -> bytes:
    """The table of contents of a safetensors file, its length, or the bytes it speaks of."""
    length = int.from_bytes(data[:8], "little")
    head, body = data[8 : 8 + length], data[8 + length :]
    what = random.randrange(8)
    if what == 0:
        wrong = random.choice(
            (0, 1, length - 1, length + 1, length + len(body) + 1, 2**40, 2**60, 2**63, 2**64 - 1)
        )
        return wrong.to_bytes(8, "little") + head + body
    if what == 1:
        return data[: 8 + length] + mutate_bytes(body, random)
    head = mutate_json(head, random) if what <= 3 else _mutate_entry(json.loads(head), random)
    return len(head).to_bytes(8, "little") + head + body


def _mutate_entry(table, random: Random) -> bytes:
    name = random.choice([name for name in table if name != "__metadata__"])
    entry = table[name]
    what = random.randrange(5)
    if what == 0:
        entry["dtype"] = random.choice(
            (
                "F64",
                "F32",
                "I64",
                "I32",
                "BOOL",
                "U8",
                "BF16",
                "F8_E4M3",
                "C64",
                "I128",
                "PICKLE",
                "f32",
            )
        )
    elif what == 1:
        entry["shape"] = random.choice(
            (
                *(
                    [],
                    [0],
                    [-1],
                    [2**60],
                    [2**32, 2**32],
                    [2**63],
                    [0, 2**62],
                    [1] * 70,
                    entry["shape"][::-1],
                ),
                *(
                    [*entry["shape"], 1],
                    [1, *entry["shape"]],
                    entry["shape"][1:],
                    [n + 1 for n in entry["shape"]],
                ),
            )
        )
    elif what == 2:
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = random.choice(
            (
                [begin, end + 8],
                [begin + 4, end + 4],
                [end, begin],
                [0, end - begin],
                [-8, 8],
                [begin, 2**60],
                [begin],
                [0, 0, 0],
            )
        )
    elif what == 3:
        entry["dtype"], entry["shape"], entry["data_offsets"] = "F32", [2**60], [0, 2**62]
    else:  # another's place
        table[name] = dict(table[random.choice([each for each in table if each != "__metadata__"])])
    return json.dumps(table).encode()


def put_special(path: Path, kind: str, root: Path) -> None:
    """Something that is no file, or another's file, at the name of one. `root` is the place of the
    whole trial.
    """
    if path.is_dir() and not path.is_symlink():
        path.rename(root / "moved away")
    else:
        path.unlink(missing_ok=True)
    bomb = Bomb(root / "exploded")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(bomb))
    elif kind == "zipped pickle":  # as torch.save writes it
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickle.dumps(bomb, protocol=2))
            file.writestr("archive/version", "3\n")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to a file":
        path.symlink_to(root / "secret")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "empty":
        path.touch()
