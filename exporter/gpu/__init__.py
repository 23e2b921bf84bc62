"""GPU metrics under the names of NVIDIA's dcgm-exporter, read from the driver (NVML) by a process of their own."""
