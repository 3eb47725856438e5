"""The provider: a dependency outside, as a real HTTP server in a process of its own, which can be told how to behave.

`owner` is the kernel's side (`lab.provider`), `server` the process, `client` the worker's side (`shop.provider`); `tab` is what one run
had to do with it. It is started when it is first needed, and ends with its lab.
"""

#: the header by which the provider tells the calls of one run from others
RUN_HEADER = "Labkit-Run"
