"""A worker that uses a request journal. A process uses one, once, so this is a program.

Arguments: the C part's file, the descriptor, and two requests to leave there (hex); without those
it prints what it finds.
"""

import ctypes
import sys

c_part = ctypes.PyDLL(sys.argv[1])
take = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)(
    lambda request, length: print(request[:length].hex())
)
assert c_part.journal_start(int(sys.argv[2])) == 0
if requests := [bytes.fromhex(request) for request in sys.argv[3:]]:
    c_part.journal_buffer.restype = ctypes.c_void_p
    buffer = ctypes.c_void_p(c_part.journal_buffer(take))
    ctypes.memmove(buffer, requests[0], len(requests[0]))
    c_part.journal_taken(buffer)
    assert c_part.journal_keep(requests[1], ctypes.c_size_t(len(requests[1])))
else:
    c_part.journal_left(True, take)
