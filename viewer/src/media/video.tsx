// A film: player, and a strip of its frames as the browser decodes them.
import { useEffect, useState } from "preact/hooks";
import { Notice } from "../ui/parts";
import { fixed } from "../ui/format";
import { SeenByModel } from "./seen";
import { mediaFacts, useMediaUrl, type MediaProperties } from "./source";

const FRAMES = 8;
const FRAME_HEIGHT = 64; // CSS pixels
const SEEK_LIMIT = 5000; // milliseconds for one frame to come

interface Frame {
  time: number;
  url: string;
}

export function VideoPlayer({ run, sha256, entry }: MediaProperties) {
  const { url, error } = useMediaUrl(entry.url);
  const [player, setPlayer] = useState<HTMLVideoElement | null>(null);
  const [unplayable, setUnplayable] = useState(false);
  const { frames, failed } = useFrames(unplayable ? null : url);
  const small = (entry.width ?? 1000) < 160;
  return (
    <figure class="medium video">
      {error && <Notice kind="problem">The film cannot be read: {error.message}</Notice>}
      {unplayable && <Notice>This browser cannot play {entry.mime ?? "this film"}. “What the model saw” gives its frames.</Notice>}
      {url && !unplayable && (
        <video ref={setPlayer} controls muted loop playsInline preload="auto" poster={frames[0]?.url} src={url} class={small ? "pixels" : ""} onError={() => setUnplayable(true)} aria-label={`Film ${sha256.slice(0, 8)}`} />
      )}
      {frames.length > 0 && (
        <div class="frames" role="group" aria-label="Frames of the film">
          {frames.map(({ time, url: frame }) => (
            <button key={time} type="button" title={`${fixed(time)} s`} onClick={() => player && ((player.currentTime = time), player.pause())}>
              <img src={frame} height={FRAME_HEIGHT} alt={`Frame at ${fixed(time)} seconds`} class={small ? "pixels" : ""} />
            </button>
          ))}
        </div>
      )}
      {failed && <p class="muted">Its frames cannot be drawn here.</p>}
      <figcaption class="muted">{mediaFacts(entry)}</figcaption>
      <SeenByModel run={run} sha256={sha256} kind="video" />
    </figure>
  );
}

function useFrames(url: string | null): { frames: Frame[]; failed: boolean } {
  const [state, setState] = useState<{ frames: Frame[]; failed: boolean }>({ frames: [], failed: false });
  useEffect(() => {
    if (!url) return;
    let ended = false;
    grab(url, () => ended).then(
      (frames) => !ended && setState({ frames, failed: false }),
      () => !ended && setState({ frames: [], failed: true }),
    );
    return () => void (ended = true);
  }, [url]);
  return state;
}

/** Frames at even times, drawn from a player of its own that nobody sees. */
async function grab(url: string, ended: () => boolean): Promise<Frame[]> {
  const film = document.createElement("video");
  film.muted = true;
  film.preload = "auto";
  film.src = url;
  await event(film, "loadeddata");
  const canvas = document.createElement("canvas");
  canvas.height = Math.min(film.videoHeight, FRAME_HEIGHT * 2);
  canvas.width = Math.max(1, Math.round((canvas.height * film.videoWidth) / film.videoHeight));
  const context = canvas.getContext("2d")!;
  const frames: Frame[] = [];
  for (let index = 0; index < FRAMES && !ended(); index++) {
    const time = ((index + 0.5) / FRAMES) * film.duration;
    const sought = event(film, "seeked");
    film.currentTime = time;
    await sought;
    context.drawImage(film, 0, 0, canvas.width, canvas.height);
    frames.push({ time, url: canvas.toDataURL("image/png") });
  }
  film.removeAttribute("src");
  film.load();
  return frames;
}

function event(film: HTMLVideoElement, name: string): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error("no frame came")), SEEK_LIMIT);
    film.addEventListener(name, () => (clearTimeout(timer), resolve()), { once: true });
    film.addEventListener("error", () => (clearTimeout(timer), reject(new Error("not decodable"))), { once: true });
  });
}
