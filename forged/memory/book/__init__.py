"""What the memory service decides by: devices, the workers that own them and their blocks, and requests that wait."""
