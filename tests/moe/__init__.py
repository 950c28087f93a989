"""The MoE block against naive transcriptions of the methods' equations."""
