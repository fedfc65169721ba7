"""`make bench-gateway`: each measurement by name, or all; a line of JSON each, and 1 where one is out of its bounds."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tests.bench_gateway import attacks, cost, prefixes, tenants

ITEMS = {"cost": cost.main, "prefixes": prefixes.main, "attacks": attacks.main, "tenants": tenants.main}


def main() -> int:
    """Runs them; 0 when all are within their bounds."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench_gateway", description=__doc__)
    parser.add_argument("items", nargs="*", choices=[*ITEMS, []], metavar="ITEM", help=", ".join(ITEMS))
    passed = True
    for name in parser.parse_args().items or ITEMS:
        began = time.monotonic()
        report = {"item": name, **ITEMS[name](), "load": [round(one, 1) for one in os.getloadavg()]}
        report["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(report, indent=2), flush=True)  # noqa: T201 - the report is for whoever ran it
        passed &= report["passed"]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
