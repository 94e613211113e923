"""kvikio as the rows of several cases use it: its settings, and what carries its bytes.

Host memory always goes by POSIX, and reads use the page cache unless a setting says otherwise,
which versions from 25.12 on have. Whole pages then go with O_DIRECT, where the file system lets
them; parts of pages do not.
"""


def configure(options):
    """Sets kvikio's defaults, for files that are opened from then on; `compat_mode` by its name."""
    import kvikio
    import kvikio.defaults

    options = dict(options)
    if "compat_mode" in options:
        options["compat_mode"] = getattr(kvikio.CompatMode, options["compat_mode"])
    if options:
        kvikio.defaults.set(options)


def go_past_page_cache(wanted):
    """Whether POSIX transfers go past the page cache; a version that has no choice goes on as it does."""
    if setting("auto_direct_io_read") is not None:
        configure({"auto_direct_io_read": wanted, "auto_direct_io_write": wanted})


def setting(name):
    """None: this version has none of that name."""
    import kvikio.defaults

    try:
        return kvikio.defaults.get(name)
    except KeyError:
        return None


def cufile_way():
    """What moves bytes where a library was told to use cuFile, and does not count them."""
    from gdsdata.io.engine import cufile_dma_is_possible

    return "cuFile" if cufile_dma_is_possible() else "cuFile, compatibility mode"


def way(file, on_gpu, writes):
    """What carries bytes between an open `file` and memory."""
    import kvikio.defaults

    if on_gpu and not kvikio.defaults.is_compat_mode_preferred():
        return cufile_way()
    direct = setting("auto_direct_io_write" if writes else "auto_direct_io_read")
    return "POSIX, O_DIRECT" if direct and file.is_direct_io_supported() else "POSIX"
