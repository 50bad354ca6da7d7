"""What the unmodified SGLang needs to run on a machine without a GPU, and tiny models for it.

Active only where no accelerator is present, and never in front of a real ``sgl_kernel``. No file of SGLang is
changed. The parts:

=============  ==========================================================================================
``imports``    import hooks, installed by a ``.pth`` file when the interpreter starts
``stand_in``   ``sgl_kernel`` for the CPU: the names that SGLang imports, and the one that it calls
``transfer``   the ``transfer_kv_*`` operations in plain torch
``plugin``     entry point ``sglang.srt.plugins``: puts the rest in place inside SGLang
``models``     tiny models, made on the spot from a seed
``prepare``    SGLang's page hash: compiled ahead of a server, or in Python
=============  ==========================================================================================
"""
