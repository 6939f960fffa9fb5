"""``python -m batchq_cli``: the same as ``batchq``."""

import os
import sys

# ``python -m`` puts the working directory in front of everything else: a redis.py or a queue.py of the
# user's would be imported in place of what we need. At the end it does no harm.
if sys.path and sys.path[0] in ("", os.getcwd()):
    sys.path.append(sys.path.pop(0))

from batchq_cli.main import main

if __name__ == "__main__":
    main(prog_name="batchq")
