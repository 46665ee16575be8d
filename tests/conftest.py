"""What holds for all tests."""

import signal

# A shell starts background jobs (CI in one, say) with Ctrl-C ignored, and so would be every process
# that a test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
