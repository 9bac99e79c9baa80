"""Rewrites tests/digests.json from this machine's bits: `python tests/make_digests.py [device]`.

Only where bits are meant to change: the change log then has to say so under "Bits changed".
"""

import json
import sys
from pathlib import Path

from digest_cases import CASES, digest_of

from truncdet._atomic import write_text

DIGESTS = Path(__file__).with_name("digests.json")


def main(device: str = "cpu", path: Path = DIGESTS) -> None:
    digests = {name: digest_of(name, device) for name in sorted(CASES)}
    write_text(path, json.dumps(digests, indent=2) + "\n")
    print(f"{len(digests)} digests of the {device} written to {path.name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
