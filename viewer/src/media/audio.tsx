// A sound: player, waveform and spectrogram of the very bytes that the model got.
import { useEffect, useRef, useState } from "preact/hooks";
import { mediaBytes } from "../data/client";
import { useWidth } from "../ui/hooks";
import { Notice } from "../ui/parts";
import { colour, watchTheme } from "../ui/theme";
import { envelope, spectrogram } from "./fft";
import { SeenByModel } from "./seen";
import { mediaFacts, useMediaUrl, type MediaProperties } from "./source";

const WAVE_HEIGHT = 56; // CSS pixels
const SPECTRUM_HEIGHT = 96;

export function AudioPlayer({ run, sha256, entry }: MediaProperties) {
  const { url, error } = useMediaUrl(entry.url);
  const player = useRef<HTMLAudioElement>(null);
  const [unplayable, setUnplayable] = useState(false);
  return (
    <figure class="medium audio">
      {error && <Notice kind="problem">The sound cannot be read: {error.message}</Notice>}
      {unplayable && <Notice>This browser cannot play {entry.mime ?? "this sound"}. “What the model saw” gives it as a wave.</Notice>}
      <Waves address={entry.url} rate={entry.sampling_rate} player={player} />
      {url && <audio ref={player} controls preload="metadata" src={url} onError={() => setUnplayable(true)} aria-label={`Sound ${sha256.slice(0, 8)}`} />}
      <figcaption class="muted">{mediaFacts(entry)}</figcaption>
      <SeenByModel run={run} sha256={sha256} kind="audio" />
    </figure>
  );
}

/** Waveform and spectrogram with the playing position; a click goes there. */
export function Waves(properties: { address: string; rate: number | null; player: { current: HTMLAudioElement | null } }) {
  const { address, player } = properties;
  const [box, width] = useWidth<HTMLDivElement>();
  const [wave, setWave] = useState<Float32Array | null>(null);
  const [rate, setRate] = useState(properties.rate ?? 16_000);
  const [error, setError] = useState("");
  useEffect(() => {
    const ended = new AbortController();
    decode(address, properties.rate, ended.signal).then(
      (decoded) => (setWave(decoded.wave), setRate(decoded.rate)),
      (reason: Error) => !ended.signal.aborted && setError(reason.message),
    );
    return () => ended.abort();
  }, [address]);
  const cursor = useCursor(player);
  const seek = (event: MouseEvent) => {
    const bounds = (event.currentTarget as HTMLElement).getBoundingClientRect();
    if (player.current?.duration) player.current.currentTime = ((event.clientX - bounds.left) / bounds.width) * player.current.duration;
  };
  if (error) return <p class="muted">The wave cannot be drawn: {error}</p>;
  return (
    <div class="waves" ref={box} onClick={seek} style={{ minHeight: `${WAVE_HEIGHT + SPECTRUM_HEIGHT}px` }}>
      {wave && width > 0 && <Drawing label="Waveform" width={width} height={WAVE_HEIGHT} draw={(canvas) => drawWave(canvas, wave)} keys={[wave]} />}
      {wave && width > 0 && (
        <Drawing label={`Spectrogram from 0 to ${rate / 2000} kHz`} width={width} height={SPECTRUM_HEIGHT} draw={(canvas) => drawSpectrum(canvas, wave)} keys={[wave]} />
      )}
      {wave && <span class="rate" aria-hidden="true">{rate / 2000} kHz</span>}
      <span class="cursor" ref={cursor} aria-hidden="true" />
    </div>
  );
}

async function decode(address: string, rate: number | null, signal: AbortSignal): Promise<{ wave: Float32Array; rate: number }> {
  const bytes = await mediaBytes(address, signal);
  const wanted = Math.min(96_000, Math.max(8_000, rate ?? 16_000));
  try {
    const decoded = await new OfflineAudioContext(1, 1, wanted).decodeAudioData(bytes);
    return { wave: decoded.getChannelData(0), rate: wanted };
  } catch {
    throw new Error("this browser cannot decode the file.");
  }
}

/** Moves a line along with the player, once a frame while it plays. */
function useCursor(player: { current: HTMLAudioElement | null }) {
  const cursor = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    let frame = 0;
    const move = () => {
      const { currentTime = 0, duration = 0 } = player.current ?? {};
      if (cursor.current) cursor.current.style.left = `${duration ? (currentTime / duration) * 100 : 0}%`;
      frame = requestAnimationFrame(move);
    };
    move();
    return () => cancelAnimationFrame(frame);
  }, []);
  return cursor;
}

function Drawing(properties: { label: string; width: number; height: number; draw: (canvas: HTMLCanvasElement) => void; keys: unknown[] }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const draw = () => canvas.current && properties.draw(canvas.current);
    draw();
    return watchTheme(draw);
  }, [properties.width, ...properties.keys]);
  const scale = Math.min(2, devicePixelRatio || 1);
  return (
    <canvas
      ref={canvas}
      role="img"
      aria-label={properties.label}
      width={properties.width * scale}
      height={properties.height * scale}
      style={{ width: `${properties.width}px`, height: `${properties.height}px` }}
    />
  );
}

function drawWave(canvas: HTMLCanvasElement, wave: Float32Array): void {
  const context = canvas.getContext("2d")!;
  const { width, height } = canvas;
  const ends = envelope(wave, width);
  let loudest = 1e-4;
  for (const sample of ends) loudest = Math.max(loudest, Math.abs(sample));
  context.clearRect(0, 0, width, height);
  context.fillStyle = colour("accent");
  for (let x = 0; x < width; x++) {
    const top = (0.5 - (0.46 * ends[x * 2 + 1]!) / loudest) * height;
    const bottom = (0.5 - (0.46 * ends[x * 2]!) / loudest) * height;
    context.fillRect(x, top, 1, Math.max(1, bottom - top));
  }
}

const DARK_TO_LIGHT = [
  [12, 12, 40],
  [62, 26, 110],
  [150, 44, 110],
  [226, 92, 66],
  [252, 176, 60],
  [252, 248, 190],
] as const;

function drawSpectrum(canvas: HTMLCanvasElement, wave: Float32Array): void {
  const context = canvas.getContext("2d")!;
  const { columns, bins, decibels } = spectrogram(wave, 600);
  const image = new ImageData(columns, bins);
  for (let column = 0; column < columns; column++) {
    for (let bin = 0; bin < bins; bin++) {
      const heat = (decibels[column * bins + bin]! + 80) / 80;
      const at = Math.min(heat, 0.9999) * (DARK_TO_LIGHT.length - 1);
      const [low, high] = [DARK_TO_LIGHT[Math.floor(at)]!, DARK_TO_LIGHT[Math.floor(at) + 1]!];
      const pixel = ((bins - 1 - bin) * columns + column) * 4;
      for (let channel = 0; channel < 3; channel++) image.data[pixel + channel] = low[channel]! + (high[channel]! - low[channel]!) * (at % 1);
      image.data[pixel + 3] = 255;
    }
  }
  const small = new OffscreenCanvas(columns, bins);
  small.getContext("2d")!.putImageData(image, 0, 0);
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}
