// On request: what was made of a medium before the model got it. Resampled wave, sampled frames, shape of the features.
import { useRef, useState } from "preact/hooks";
import { read, runPath } from "../data/client";
import type { Seen } from "../data/types";
import { count, fixed, number, plural } from "../ui/format";
import { useLoad } from "../ui/hooks";
import { Loading, Notice } from "../ui/parts";
import { Waves } from "./audio";
import { useMediaUrl } from "./source";

export function SeenByModel(properties: { run: string; sha256: string; kind: "image" | "audio" | "video" }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="seen" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>What the model {properties.kind === "audio" ? "heard" : "saw"}</summary>
      {open && <SeenView {...properties} />}
    </details>
  );
}

function SeenView({ run, sha256 }: { run: string; sha256: string }) {
  const { value, error } = useLoad((signal) => read<Seen>(`${runPath(run)}/seen/${sha256}.json`, {}, signal), [run, sha256]);
  if (error) return <Notice>It is not known what the model got of this: {error.message}</Notice>;
  if (!value) return <Loading what="what the model got" />;
  if (value.kind === "audio") return <Heard seen={value} />;
  const frames = value.frames ?? [];
  return (
    <div>
      <p class="muted">
        {value.kind === "video" ? `${plural(frames.length, "frame")}${value.fps ? `, ${number(value.fps)} a second` : ""}, each ` : ""}
        {count(value.width)} × {count(value.height)} pixels
        {value.features ? `; features of shape ${value.features.shape.join(" × ")}` : ""}
        {tokens(value)}
      </p>
      <div class="frames">
        {frames.map((frame, index) => (
          <Frame key={frame} address={frame} time={value.times?.[index]} />
        ))}
      </div>
    </div>
  );
}

function tokens(seen: Seen): string {
  return seen.tokens === undefined ? "" : `; ${plural(seen.tokens, "placeholder token")} in the prompt`;
}

function Frame({ address, time }: { address: string; time: number | undefined }) {
  const { url } = useMediaUrl(address);
  const at = time === undefined ? "" : ` at ${fixed(time)} s`;
  return url ? <img src={url} height={64} class="pixels" alt={`Frame that the model saw${at}`} title={at} /> : null;
}

function Heard({ seen }: { seen: Seen }) {
  const player = useRef<HTMLAudioElement>(null);
  const { url } = useMediaUrl(seen.wave ?? "");
  return (
    <div>
      <p class="muted">
        {count(seen.samples)} samples at {number((seen.sampling_rate ?? 0) / 1000)} kHz, one channel
        {seen.features ? `; features of shape ${seen.features.shape.join(" × ")}` : ""}
        {tokens(seen)}
      </p>
      {seen.wave && <Waves address={seen.wave} rate={seen.sampling_rate ?? null} player={player} />}
      {seen.wave && url && <audio ref={player} controls preload="none" src={url} aria-label="The wave that the model heard" />}
    </div>
  );
}
