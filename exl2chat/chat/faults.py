"""What becomes of a defect on the event loop: it is logged, and the chat goes on."""

import asyncio
from collections.abc import Coroutine


def log_fault(message: str, fault: Exception) -> None:
    """Report `fault` to the event loop, which logs it."""
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": fault})


async def fault_in(work: Coroutine[object, object, None], what: str) -> Exception | None:
    """Do `work`. What it raises is logged, as the failure of `what`, and returned."""
    try:
        await work
    except Exception as fault:
        log_fault(f"{what} failed", fault)
        return fault
    return None
