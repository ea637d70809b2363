"""A worker entry whose import never ends."""

import threading

threading.Event().wait()
