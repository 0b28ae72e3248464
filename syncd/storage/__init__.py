"""How shared storage is changed and watched: the seam, the fence, the leases, the waiting."""
