// A spectrogram by our own FFT: magnitudes in decibels of Hann windows.

/** In-place radix-2 FFT of `real` and `imaginary`, whose length is a power of two. */
export function fft(real: Float64Array, imaginary: Float64Array): void {
  const n = real.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      [real[i], real[j]] = [real[j]!, real[i]!];
      [imaginary[i], imaginary[j]] = [imaginary[j]!, imaginary[i]!];
    }
  }
  for (let length = 2; length <= n; length <<= 1) {
    const angle = (-2 * Math.PI) / length;
    for (let start = 0; start < n; start += length) {
      for (let k = 0; k < length / 2; k++) {
        const [cos, sin] = [Math.cos(angle * k), Math.sin(angle * k)];
        const [a, b] = [start + k, start + k + length / 2];
        const re = real[b]! * cos - imaginary[b]! * sin;
        const im = real[b]! * sin + imaginary[b]! * cos;
        real[b] = real[a]! - re;
        imaginary[b] = imaginary[a]! - im;
        real[a] = real[a]! + re;
        imaginary[a] = imaginary[a]! + im;
      }
    }
  }
}

export interface Spectrogram {
  columns: number;
  bins: number;
  /** Decibels below the loudest, [columns * bins], from 0 down to -80; bin 0 is the lowest frequency. */
  decibels: Float32Array;
}

/** Spectrogram of a wave in about `columns` windows of `size` samples. */
export function spectrogram(wave: Float32Array, columns: number, size = 512): Spectrogram {
  const bins = size / 2;
  const windows = Math.max(1, Math.min(columns, Math.ceil(wave.length / (size / 4))));
  const out = new Float32Array(windows * bins);
  const hann = Float64Array.from({ length: size }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / size));
  let loudest = 1e-12;
  for (let column = 0; column < windows; column++) {
    const centre = windows === 1 ? wave.length / 2 : (column / (windows - 1)) * wave.length;
    const start = Math.round(centre - size / 2);
    const real = new Float64Array(size);
    const imaginary = new Float64Array(size);
    for (let i = 0; i < size; i++) real[i] = (wave[start + i] ?? 0) * hann[i]!;
    fft(real, imaginary);
    for (let bin = 0; bin < bins; bin++) {
      const power = real[bin]! ** 2 + imaginary[bin]! ** 2;
      out[column * bins + bin] = power;
      if (power > loudest) loudest = power;
    }
  }
  for (let i = 0; i < out.length; i++) out[i] = Math.max(-80, 10 * Math.log10(out[i]! / loudest + 1e-12));
  return { columns: windows, bins, decibels: out };
}

/** Lowest and highest sample of each of `columns` stretches of a wave: [columns * 2]. */
export function envelope(wave: Float32Array, columns: number): Float32Array {
  const out = new Float32Array(columns * 2);
  for (let column = 0; column < columns; column++) {
    const start = Math.floor((column / columns) * wave.length);
    const end = Math.max(start + 1, Math.floor(((column + 1) / columns) * wave.length));
    let [low, high] = [Infinity, -Infinity];
    for (let i = start; i < end; i++) {
      const sample = wave[i] ?? 0;
      if (sample < low) low = sample;
      if (sample > high) high = sample;
    }
    out[column * 2] = low;
    out[column * 2 + 1] = high;
  }
  return out;
}
