"""The transformer layer and what runs it.

    families ─▶ transformer ─▶ hidden states
                 │ weights, feed_forward, rotary, workspace, precision
                 └ pattern (who sees whom): rectangle | packed | landmark_windows
                     └ attention, block_local_attention, landmark_attention

``openvino_graph`` and ``openvino_backbone`` run the same layers as an OpenVINO graph. Import from the
modules; this package imports nothing by itself.
"""
